"""The server as Python sees it: start, warm up, answer, drain."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np

from ..jit_cache import (
    CompileService,
    Program,
    Servable,
    WarmupReport,
    WarmupStep,
    seal_process,
    unseal_process,
    warm_up,
)
from .admission import QueueLimits
from .batcher import Policy
from .clock import Clock, MonotonicClock
from .device import BatchRecord, DeviceLoop, Probe
from .dispatcher import Dispatcher
from .errors import Closed, ConfigError, NotReady, UnknownModel
from .model import Model, Rows
from .request import DEFAULT_PRIORITY
from .sinks import Sinks

OnProgress = Callable[[str, WarmupStep], None]
_PROBE_TIMEOUT_S = 300.0


class Server:
    """Serves one or more servables from one device.

    Use it as a context manager (starts, waits until ready, drains and closes), or call `start`,
    `wait_ready` and `close`.

    Args:
        servables: what to serve; names are distinct.
        max_wait_s: most seconds that an idle device waits for a batch to fill.
        queue: bounds on what may wait.
        max_request_rows: most rows in one request.
        ready_when: ``"grid"``: ready once every bucket is warm; ``"coverage"``: once the bucket that holds
            everything is, the others following in the background.
        seal: forbid tracing in the whole process once warm (`servax serve` does); otherwise only the
            server's own path is kept from compiling.
        depth: batches in flight; by default 1 on a CPU, 2 elsewhere.
        on_progress: called with the model's name and each warm-up step, in the warm-up thread.
        on_batch: called with each batch's record, in the device thread.
        clock: source of time, for tests.

    Raises:
        ConfigError: on an impossible setting.
    """

    def __init__(
        self,
        *servables: Servable,
        max_wait_s: float = 0.0,
        queue: QueueLimits | None = None,
        max_request_rows: int = 2048,
        ready_when: str = "grid",
        seal: bool = False,
        depth: int | None = None,
        on_progress: OnProgress | None = None,
        on_batch: Callable[[BatchRecord], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        names = [servable.name for servable in servables]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a server needs models with distinct names; got {names}")
        if ready_when not in ("grid", "coverage"):
            raise ConfigError(f"ready_when is 'grid' or 'coverage'; got {ready_when!r}")
        limits = queue if queue is not None else QueueLimits()
        if max_request_rows < 1 or max_request_rows > limits.rows:
            raise ConfigError(
                f"max_request_rows is from 1 to the {limits.rows} rows that the queue holds; got {max_request_rows}"
            )
        self._clock = clock if clock is not None else MonotonicClock()
        self._compiler = CompileService()
        self._dispatcher = Dispatcher(self._clock, limits)
        sinks = Sinks()
        made = [
            Model(
                servable,
                dispatcher=self._dispatcher,
                compiler=self._compiler,
                clock=self._clock,
                sinks=sinks,
                policy=Policy(max_wait_s=max_wait_s),
                max_request_rows=max_request_rows,
                ready_when=ready_when,
            )
            for servable in servables
        ]
        self.models: Mapping[str, Model] = MappingProxyType({model.name: model for model in made})
        if depth is None:
            depth = 1 if jax.default_backend() == "cpu" else 2
        self._device = DeviceLoop(self._dispatcher, made, self._clock, depth=depth, on_batch=on_batch)
        self._on_progress = on_progress
        self._seal, self._sealed = seal, False
        self._stop_warmup = threading.Event()
        self._settled = threading.Condition()
        self._warmup: threading.Thread | None = None
        self._warmup_error: BaseException | None = None
        self._state = "new"

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to warm up in the background; returns at once.

        Raises:
            Closed: if it was started or closed before.
        """
        if self._state != "new":
            raise Closed(f"a server is started once; this one is {self._state}: make a new one")
        self._state = "warming"
        self._device.start()
        self._warmup = threading.Thread(target=self._warm_all, name="servax-warmup", daemon=True)
        self._warmup.start()
        return self

    def _warm_all(self) -> None:
        try:
            for model in self.models.values():
                warm_up(
                    model.cache,
                    model.order,
                    lambda program, model=model: self._probe(model, program),  # type: ignore[misc]
                    report=model.report,
                    on_step=lambda step, model=model: self._stepped(model, step),  # type: ignore[misc]
                    stop=self._stop_warmup,
                )
            if all(model.report.complete for model in self.models.values()):
                self._compiler.warmed()
                if self._seal and not self._stop_warmup.is_set():
                    seal_process()
                    self._sealed = True
        except BaseException as error:  # shown by status() and wait_ready(), never lost in the thread
            self._warmup_error = error
        finally:
            with self._settled:
                if self._state == "warming":
                    self._state = "serving"
                self._settled.notify_all()

    def _probe(self, model: Model, program: Program) -> float:
        probe = Probe(model, program, Future())
        self._dispatcher.post(probe)
        return probe.seconds.result(_PROBE_TIMEOUT_S)

    def _stepped(self, model: Model, step: WarmupStep) -> None:
        if self._on_progress is not None:
            self._on_progress(model.name, step)
        with self._settled:
            self._settled.notify_all()

    def wait_ready(self, timeout_s: float = 900.0) -> Self:
        """Block until every model is ready.

        Raises:
            WarmupError: if a bucket failed, naming each and its error.
            NotReady: if the timeout passes first.
        """
        give_up = time.monotonic() + timeout_s
        with self._settled:
            while not self.ready:
                if self._warmup_error is not None:
                    raise self._warmup_error
                if self._state != "warming":
                    for model in self.models.values():
                        model.report.require_complete()
                    raise Closed(f"a server must be started to get ready; this one is {self._state}")
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    raise NotReady(f"the server was to be ready within {timeout_s} s; {self.status()}")
                self._settled.wait(left_s)
        return self

    def close(self, drain_s: float = 30.0) -> None:
        """Take no more requests, answer those admitted until the deadline, fail the rest, end the threads.

        Calling it again does nothing.
        """
        if self._state == "closed":
            return
        self._dispatcher.drain()
        self._state = "draining"
        self._stop_warmup.set()
        give_up = time.monotonic() + drain_s
        while not self._dispatcher.idle and self._device.alive and time.monotonic() < give_up:
            time.sleep(0.005)
        self._dispatcher.close()
        if self._device.alive:
            self._device.stop(timeout_s=5.0)
        self._compiler.close()
        if self._warmup is not None:
            self._warmup.join(5.0)
        if self._sealed:
            unseal_process()
            self._sealed = False
        self._state = "closed"

    async def aclose(self, drain_s: float = 30.0) -> None:
        """`close` without holding the event loop."""
        await asyncio.to_thread(self.close, drain_s)

    def __enter__(self) -> Self:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.close(drain_s=0.0)
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- health -------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether the device thread runs (or was not started yet)."""
        return self._state in ("new", "warming") or (self._device.alive and self._device.failure is None)

    @property
    def ready(self) -> bool:
        """Whether every model is ready and requests are taken."""
        return (
            self._state in ("warming", "serving")
            and self._device.alive
            and all(model.ready for model in self.models.values())
        )

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""
        return self._state in ("draining", "closed")

    def status(self) -> dict[str, Any]:
        """State, warm-up progress and failures, for people and for the body of a 503."""
        reports = {name: model.report for name, model in self.models.items()}
        failed = {
            f"{name} {bucket}": why for name, one in reports.items() for bucket, why in one.failed.items()
        }
        error = self._warmup_error or self._device.failure
        return {
            "state": "ready" if self.ready else "failed" if failed or error else self._state,
            "done": sum(len(report.warm) for report in reports.values()),
            "total": sum(report.total for report in reports.values()),
            "failed": failed,
            "error": str(error) if error else None,
        }

    @property
    def reports(self) -> Mapping[str, WarmupReport]:
        """Warm-up reports by model name."""
        return {name: model.report for name, model in self.models.items()}

    def load(self) -> dict[str, int]:
        """Rows and elements that wait, rows that run."""
        waiting, running = self._dispatcher.load()
        return {"waiting_rows": waiting.rows, "waiting_elements": waiting.elements, "running_rows": running}

    # -- answers ------------------------------------------------------------------------------------

    def model(self, name: str | None = None) -> Model:
        """A model by name; the name may be left out where there is only one.

        Raises:
            UnknownModel: naming those that are served.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            raise UnknownModel(
                f"models served here are {sorted(self.models)}; got {name!r}: name one of them"
            )
        return self.models[name]

    def __call__(
        self, *args: Any, model: str | None = None, timeout_s: float | None = None, **inputs: Any
    ) -> Any:
        """Answer one item or a batch, blocking.

        Args:
            args: the input itself, where the model takes only one.
            model: name of the model, where there are several.
            timeout_s: seconds until the answer must be there.
            inputs: arrays by input name: with the declared dims for one item, or with one more, rows, in
                front.

        Returns:
            What the model returns, with NumPy leaves: without a batch dim for one item, with it for rows.
        """
        served = self.model(model)
        rows, single = _rows(served, args, inputs)
        future = served.run_threaded(rows, timeout_s=timeout_s)
        return _assemble(served, future.result(), single)

    async def submit(
        self,
        *args: Any,
        model: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        timeout_s: float | None = None,
        **inputs: Any,
    ) -> Any:
        """Answer one item or a batch, for asyncio; as `__call__` otherwise.

        Cancelling the awaiting task frees the request's place at once.
        """
        served = self.model(model)
        rows, single = _rows(served, args, inputs)
        return _assemble(served, await served.run(rows, priority=priority, timeout_s=timeout_s), single)

    def map(self, items: Sequence[Mapping[str, Any]], *, model: str | None = None) -> list[Any]:
        """Answer items of different sizes, blocking; any number, sent in requests of legal size.

        Args:
            items: arrays of each item by input name.
            model: name of the model, where there are several.

        Returns:
            What the model returns for each item, in order.
        """
        served = self.model(model)
        step = served.max_request_rows
        flying: deque[Future[list[list[np.ndarray]]]] = deque()
        answers: list[Any] = []

        def collect() -> None:
            answers.extend(_assemble(served, [row], True) for row in flying.popleft().result())

        for begin in range(0, len(items), step):
            # Never more than two requests of ours in the queue, which other callers share.
            if len(flying) == 2:
                collect()
            flying.append(served.run_threaded(items[begin : begin + step]))
        while flying:
            collect()
        return answers


def _rows(model: Model, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Rows, bool]:
    names = [one.name for one in model.inputs]
    if len(args) > len(names) or any(name in inputs for name in names[: len(args)]):
        raise TypeError(
            f"model {model.name!r} takes the inputs {names}; got {len(args)} positional and {sorted(inputs)}"
        )
    given = dict(zip(names, args, strict=False)) | inputs
    first = next((one for one in model.inputs if one.name in given), None)
    if first is None or np.ndim(given[first.name]) == len(first.dims):
        return [given], True
    arrays = {name: np.asarray(value) for name, value in given.items()}
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise TypeError(f"the inputs of a batch have the same number of rows; got {counts}")
    return [{name: array[row] for name, array in arrays.items()} for row in range(counts[first.name])], False


def _assemble(model: Model, rows: list[list[np.ndarray]], single: bool) -> Any:
    outputs = model.servable.outputs
    if single:
        return jax.tree.unflatten(outputs.treedef, rows[0])
    if not rows:
        leaves = [
            np.zeros((0, *(d if isinstance(d, int) else 0 for d in leaf.dims)), leaf.dtype)
            for leaf in outputs.leaves
        ]
    else:
        leaves = [np.stack(column) for column in zip(*rows, strict=True)]
    return jax.tree.unflatten(outputs.treedef, leaves)
