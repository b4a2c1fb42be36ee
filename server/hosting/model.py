"""One served model: its programs, its staging buffers, its batcher and its door."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from ...bucketing import Bucket, CostModel, DoesNotFit, Grid
from ...jit_cache import (
    Input,
    Output,
    Program,
    ProgramCache,
    Servable,
    Staging,
    WarmupReport,
    warmup_order,
)
from ...jit_cache.schedule import value_order
from ...jit_cache.step_program import CaseProgram, StepStaging
from ..batching.batcher import Batcher
from ..batching.request import DEFAULT_PRIORITY, Request, Row
from ..errors import Closed, Left
from .door import Door, Rows, allowed_s, check_call, not_ready
from .keeping import Keeper
from .maker import Maker
from .refit import Traffic
from .shared import Shared
from .succession import Succession


class Model(Succession):
    """A servable inside a server: what the transports and the Python API talk to.

    Made by `Server`; shares its device thread, queue and compile thread.

    Attributes:
        held: whether readiness, where it asks for the whole grid, waits for the end of the warm-up besides.
        fitted: the grid that a re-fit put in place of the servable's; None before.
    """

    def __init__(self, servable: Servable, shared: Shared) -> None:
        super().__init__(shared.dispatcher)
        self._servable: Servable | None = servable
        self.name = servable.name
        self.version = servable.version
        self.max_request_rows = shared.max_request_rows
        self.timeout_s = shared.timeout_s
        self.cost = CostModel()
        self.batcher = Batcher(self.cost, shared.policy)
        self.lane = shared.dispatcher.add_lane(self.batcher)
        shapes = (shared.programs.shapes or {}).get(servable.name, ())
        self.order = value_order(servable.grid, shapes) if shapes else warmup_order(servable.grid)
        self.report = WarmupReport(len(self.order))
        self.maker = Maker(servable, shared.compile_program)
        self.cache = ProgramCache(self.maker, shared.compiler)
        self._door: Door | None = Door(servable)
        self.checks_outputs = shared.programs.check_outputs
        self.keeper = Keeper(self, shared.programs, shared.dispatcher)
        self._lazy = shared.programs.policy == "lazy"
        self._needs_all = shared.ready_when == "grid"
        self._ready = self.held = False
        self._clock, self._sinks = shared.clock, shared.sinks
        self._opened: list[Bucket] = []
        self._staging: dict[object, list[Staging | StepStaging]] = {}
        self.traffic: Traffic | None = None
        self.fitted: Grid | None = None

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.cache.ready())} of {len(self.order)} programs warm)"

    # -- what it is ---------------------------------------------------------------------------------

    @property
    def servable(self) -> Servable:
        """What is served; of a model that gave way and has left, the successor's."""
        servable = self._servable  # read once: the compile thread lets it go
        if servable is not None:
            return servable
        if self._successor is None:
            raise Closed(f"model {self.name!r} was never served: ask for the one that is")
        return self.latest.servable

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
            covered = self.order[0] in warm or self._lazy
            # A budget that is used up ends the wait for the whole grid, never for the covering bucket.
            whole = (self.report.complete or self.report.enough) and not self.held
            self._ready = covered and (whole or not self._needs_all)
        return self._ready

    @property
    def lost(self) -> bool:
        """Whether a bucket failed without which the model never gets ready."""
        failed = self.report.failed
        return bool(failed) if self._needs_all else self.order[0] in failed

    def unload(self) -> None:
        """Let programs, buffers and weights go; nothing waits, nothing runs and nothing more is let in."""
        self.batcher.planner = None
        for bucket in {*self._opened, *self.cache.ready()}:  # some that were just made are not opened yet
            self._let_go(bucket)
        self._opened = []
        self.maker.release()
        self._servable = self._door = None

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
        door, later = self._door, self._successor
        if later is not None:
            return later.latest.admit(rows, priority=priority, timeout_s=timeout_s, future=future, loop=loop)
        if not self.ready or door is None:
            raise not_ready(self.name, self.report, len(self.order), lost=self.lost)
        check_call(len(rows), self.max_request_rows, priority)
        items, sizes = door.check(rows)
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
        try:
            self._dispatcher.offer(self.lane, request, self.batcher)
        except Left:  # it gave way since it was asked above
            return self.latest.admit(rows, priority=priority, timeout_s=timeout_s, future=future, loop=loop)
        if self.batcher.planner is None:  # lazy: the first request has the first program made
            self.keeper.wake()
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

    def opened(self, bucket: Bucket, run_s: float) -> None:
        """A program is warm and was timed: from now on it is planned with; device thread only."""
        program = self.cache.get(bucket)
        if program.facts.flops > 0 and not isinstance(program, CaseProgram):
            self.cost.set_prior(bucket, flops=program.facts.flops, bytes=program.facts.bytes_accessed)
        if run_s > 0:  # a manual clock measures nothing
            self.cost.observe(bucket, run_s)
        if bucket not in self._opened:  # the warm-up and a request may have asked for it both
            self._opened.append(bucket)
        for victim in self.keeper.opened(bucket):
            self._opened.remove(victim)
            self._let_go(victim)
        grid = Grid(self.servable.grid.axes, self._opened)
        self.batcher.planner = self.servable.planner(grid, self.cost, self.batcher.policy.window)

    def replace_program(self, program: Program, run_s: float) -> None:
        """Run a bucket by another of its variants from the next batch on; device thread."""
        self.cost.restart(program.bucket, run_s)
        self.cache.install(program)

    def timed_again(self, program: Program, run_s: float) -> None:
        """A program was timed once more, and the least counts until traffic corrects it; device thread."""
        bucket = program.bucket
        known_s = self.cost.measured().get(bucket, 0.0)
        if self.cache.find(bucket) is program and self.cost.hopes(bucket) and 0 < run_s < known_s:
            self.cost.restart(bucket, run_s)

    def narrow(self, order: list[Bucket]) -> None:
        """Warm up these buckets only, the covering one first; before the warm-up begins."""
        self.order = order
        self.report.total = len(order)
        self.keeper.residency.replan(Grid(self.servable.grid.axes, order))

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
        self.batcher.planner = self.servable.planner(grid, self.cost, self.batcher.policy.window)
        for bucket in self._opened:
            if bucket not in grid:
                self._let_go(bucket)
        self._opened, self.fitted = list(grid), grid
        self.keeper.residency.replan(grid)

    def _let_go(self, bucket: Bucket) -> None:
        self.cache.discard(bucket)
        self._staging.pop(bucket, None)

    def smallest(self, bucket: Bucket, rows: Sequence[Row]) -> Bucket:
        """The smallest warm bucket for rows that `bucket` holds; pinned ones stay. Device thread only."""
        planner = self.batcher.planner
        if planner is not None and all(row.request.pin is None for row in rows):
            with suppress(DoesNotFit):  # of packed rows, if the bucket gave way to others meanwhile
                return planner.smallest([row.sizes for row in rows])
        return bucket

    def box(self, bucket: Bucket, rows: Sequence[Row]) -> tuple[int, tuple[int, ...]]:
        """Rows and sizes that a batch of this bucket needs: of packed rows the bucket's own."""
        largest = tuple(map(max, zip(*[row.sizes for row in rows], strict=True)))
        return (bucket.rows if self.servable.layout == "packed" else len(rows)), largest

    def most_steps(self, bucket: Bucket) -> int:
        """How many batches may share the call of this bucket's program; device thread only."""
        program = self.cache.find(bucket)
        return program.stepped.layout.plan.steps if isinstance(program, CaseProgram) else 1

    def borrow_staging(self, program: Program) -> Staging | StepStaging:
        """A staging set for a program that no batch in flight uses; device thread only."""
        free = self._staging.setdefault(_staged_as(program), [])
        with suppress(IndexError):  # of several device threads another may take the last
            return free.pop()
        if isinstance(program, CaseProgram):
            return StepStaging(self.servable.signature, program.stepped.layout)
        return self.servable.staging(program.bucket)

    def return_staging(self, program: Program, staging: Staging | StepStaging) -> None:
        """Give a set back once its batch has ended; device thread only."""
        self._staging.setdefault(_staged_as(program), []).append(staging)


def _staged_as(program: Program) -> object:
    """Cases of one stepped program share their buffers."""
    return program.stepped if isinstance(program, CaseProgram) else program.bucket
