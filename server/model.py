"""One served model: its programs, its staging buffers, its batcher and its door."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket, CostModel, Grid, Planner
from ..jit_cache import (
    CompileService,
    Input,
    Output,
    Program,
    ProgramCache,
    Servable,
    Staging,
    WarmupReport,
    warmup_order,
)
from .batcher import Batcher, Policy
from .clock import Clock
from .dispatcher import Dispatcher
from .door import Door, Rows, allowed_s, check_call
from .errors import ConfigError, NotReady
from .refit import Traffic
from .request import DEFAULT_PRIORITY, Request, Row
from .sinks import Sinks

Compile = Callable[[Servable, Bucket, Sequence[jax.Array]], Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the models of one server have in common; see `Server`.

    Raises:
        ConfigError: on an impossible setting.
    """

    dispatcher: Dispatcher
    compiler: CompileService
    clock: Clock
    sinks: Sinks
    policy: Policy
    max_request_rows: int
    timeout_s: float | None
    ready_when: str
    compile_program: Compile

    def __post_init__(self) -> None:
        if self.ready_when not in ("grid", "coverage"):
            raise ConfigError(f"ready_when is 'grid' or 'coverage'; got {self.ready_when!r}")
        if self.max_request_rows < 1:
            raise ConfigError(f"max_request_rows is at least 1; got {self.max_request_rows}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                f"timeout_s is a finite number above 0, or None for no bound; got {self.timeout_s}"
            )


class Model:
    """A servable inside a server: what the transports and the Python API talk to.

    Made by `Server`; shares its device thread, queue and compile thread.
    """

    def __init__(self, servable: Servable, shared: Shared) -> None:
        self.servable = servable
        self.name = servable.name
        self.version = servable.version
        self.max_request_rows = shared.max_request_rows
        self.timeout_s = shared.timeout_s
        self.cost = CostModel()
        self.batcher = Batcher(self.cost, shared.policy)
        self.lane = shared.dispatcher.add_lane(self.batcher)
        self.order = warmup_order(servable.grid)
        self.report = WarmupReport(len(self.order))
        self.cache = ProgramCache(self._compile, shared.compiler)
        self._door = Door(servable)
        self._needs_all = shared.ready_when == "grid"
        self._ready = False
        self._dispatcher, self._clock, self._sinks = shared.dispatcher, shared.clock, shared.sinks
        self._compile_program = shared.compile_program
        self._leaves: Sequence[jax.Array] | None = None
        self._opened: list[Bucket] = []
        self._staging: dict[Bucket, list[Staging]] = {}
        self.traffic: Traffic | None = None

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.cache.ready())} of {len(self.order)} programs warm)"

    # -- what it is ---------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What callers send."""
        return self.servable.signature.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What callers get."""
        return self.servable.outputs.leaves

    @property
    def limits(self) -> Mapping[str, int]:
        """Largest size of each axis; ``batch`` is the most rows run at once."""
        return self.servable.limits

    @property
    def allow_nonfinite(self) -> bool:
        """Whether NaN and infinity may pass in float inputs."""
        return self.servable.allow_nonfinite

    @property
    def ready(self) -> bool:
        """Whether warm-up reached what readiness asks for: the whole grid, or the covering bucket."""
        if not self._ready:
            warm = [one.bucket for one in self.report.warm]
            self._ready = self.report.complete if self._needs_all else self.order[0] in warm
        return self._ready

    @property
    def lost(self) -> bool:
        """Whether a bucket failed without which the model never gets ready."""
        failed = self.report.failed
        return bool(failed) if self._needs_all else self.order[0] in failed

    def load(self) -> tuple[int, int]:
        """Rows that wait and rows that run."""
        waiting, running = self._dispatcher.load(self.lane)
        return waiting.rows, running

    # -- the door -----------------------------------------------------------------------------------

    def admit(
        self,
        rows: Rows,
        *,
        priority: int,
        timeout_s: float | None,
        future: Any,
        loop: asyncio.AbstractEventLoop | None,
    ) -> Request:
        """Check every row and put the request into the queue.

        Raises:
            ServerError: whatever the door refuses; nothing was queued then.
        """
        if not self.ready:
            raise NotReady(
                f"model {self.name!r} answers once it is warm; {len(self.report.warm)} of {len(self.order)} "
                f"programs are: retry shortly"
            )
        check_call(len(rows), self.max_request_rows, priority)
        items, sizes = self._door.check(rows)
        now_s = self._clock.now()
        request = Request(
            items,
            sizes,
            arrived_s=now_s,
            sink=self._sinks.threads if loop is None else self._sinks.of_loop(loop),
            future=future,
            priority=priority,
            deadline_s=now_s + allowed_s(self.timeout_s, timeout_s),
        )
        self._dispatcher.offer(self.lane, request)
        return request

    async def run(
        self, rows: Rows, *, priority: int = DEFAULT_PRIORITY, timeout_s: float | None = None
    ) -> list[list[np.ndarray]]:
        """Output leaves of each row, in order; cancelling the caller's task frees the place at once."""
        if not rows:
            return []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[list[np.ndarray]]] = loop.create_future()
        request = self.admit(rows, priority=priority, timeout_s=timeout_s, future=future, loop=loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._dispatcher.cancel(request)
            raise

    async def submit(
        self, rows: Rows, *, priority: int = 0, timeout_s: float | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Answer rows of any sizes, for the transports.

        Args:
            rows: arrays of each row by input name, without a batch dim; ragged across rows.
            priority: 1 (most urgent) to 9; 0 means not set.
            timeout_s: seconds until the answer must be there; None or 0 means not set.

        Returns:
            Output arrays of each row by output name, in order.
        """
        results = await self.run(rows, priority=priority or DEFAULT_PRIORITY, timeout_s=timeout_s)
        names = [leaf.name for leaf in self.outputs]
        return [dict(zip(names, row, strict=True)) for row in results]

    def run_threaded(
        self, rows: Rows, *, priority: int = DEFAULT_PRIORITY, timeout_s: float | None = None
    ) -> "Future[list[list[np.ndarray]]]":
        """The same for threads: a future of the output leaves of each row; cancelling it frees the place."""
        future: Future[list[list[np.ndarray]]] = Future()
        if not rows:
            future.set_result([])
            return future
        request = self.admit(rows, priority=priority, timeout_s=timeout_s, future=future, loop=None)

        def settled(_: object) -> None:
            if future.cancelled():
                self._dispatcher.cancel(request)

        future.add_done_callback(settled)
        return future

    # -- programs: compile thread and device thread --------------------------------------------------

    def _compile(self, bucket: Bucket) -> Program:
        if self._leaves is None:
            self._leaves = [jax.device_put(leaf) for leaf in self.servable.leaves]
        _ = self.servable.outputs  # inferred here, where tracing is allowed
        return self._compile_program(self.servable, bucket, self._leaves)

    def opened(self, bucket: Bucket, run_s: float) -> None:
        """A program is warm and was timed: from now on it is planned with; device thread only."""
        if run_s > 0:  # a manual clock measures nothing
            self.cost.observe(bucket, run_s)
        self._opened.append(bucket)
        grid = Grid(self.servable.grid.axes, self._opened)
        self.batcher.planner = Planner(grid, self.cost, window=self.batcher.policy.window)

    @property
    def grid(self) -> Grid:
        """The buckets that are planned with; those of the servable until some are warm."""
        planner = self.batcher.planner
        return self.servable.grid if planner is None else planner.grid

    def swap(self, grid: Grid) -> None:
        """Plan with these warm buckets only, and let the other programs go; device thread, none in flight.

        Raises:
            KeyError: if a bucket of the grid is not warm; nothing changes.
        """
        if missing := [str(bucket) for bucket in grid if bucket not in self._opened]:
            raise KeyError(f"a grid is swapped in once all of it is warm; {missing} are not")
        grid.check_coverage({axis: self.limits[axis] for axis in grid.item_axes})
        self.batcher.planner = Planner(grid, self.cost, window=self.batcher.policy.window)
        for bucket in self._opened:
            if bucket not in grid:
                self.cache.discard(bucket)
                self._staging.pop(bucket, None)
        self._opened = list(grid)

    def smallest(self, bucket: Bucket, rows: Sequence[Row]) -> Bucket:
        """The smallest warm bucket for rows that `bucket` holds; device thread only."""
        if self.batcher.planner is None:
            return bucket
        largest = tuple(map(max, zip(*[row.sizes for row in rows], strict=True)))
        return self.batcher.planner.grid.smallest(len(rows), largest)

    def borrow_staging(self, bucket: Bucket) -> Staging:
        """A staging set of the bucket that no batch in flight uses; device thread only."""
        free = self._staging.setdefault(bucket, [])
        return free.pop() if free else Staging(self.servable.signature, bucket)

    def return_staging(self, bucket: Bucket, staging: Staging) -> None:
        """Give a set back once its batch has ended; device thread only."""
        self._staging[bucket].append(staging)
