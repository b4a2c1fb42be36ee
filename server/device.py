"""The device thread: the only one that launches programs.

It takes what the dispatcher chose, pads it, launches, waits, cuts the padding off and reports. Nothing a
model does ends it: a failing batch is bisected, so that only the culprit's caller sees the error.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from ..jit_cache import REQUEST, OutputError, Program, SealedError, Staging, compile_log, explain_sealed
from .clock import Clock
from .dispatcher import Dispatcher, Work
from .errors import ModelError
from .model import Model
from .request import Row

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one batch was, for metrics.

    Attributes:
        model: its model's name.
        bucket: where it ran.
        rows: real rows.
        real: real elements (product of each row's sizes, summed).
        computed: elements of the bucket.
        seconds: from launch to outputs on the host.
        reason: why it was launched: full, window, deadline or idle.
        queued_s: seconds that each row waited for the launch.
    """

    model: str
    bucket: Bucket
    rows: int
    real: int
    computed: int
    seconds: float
    reason: str
    queued_s: tuple[float, ...]


@dataclass(slots=True)
class _InFlight:
    model: Model
    bucket: Bucket
    rows: tuple[Row, ...]
    staging: Staging
    leaves: list[jax.Array]
    launched_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A warm-up run of one program through the same path as requests, on padding only."""

    model: Model
    program: Program
    seconds: "Future[float]"


class DeviceLoop:
    """Runs what the dispatcher chooses.

    Args:
        dispatcher: where work comes from and results go.
        models: by lane.
        clock: source of time.
        depth: batches in flight; 2 hides launch costs on accelerators, 1 batches best on a CPU.
        on_batch: told of each batch, in the device thread; must not block.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: Sequence[Model],
        clock: Clock,
        *,
        depth: int,
        on_batch: Callable[[BatchRecord], None] | None = None,
    ) -> None:
        self._dispatcher, self._models, self._clock = dispatcher, models, clock
        self._depth = depth
        self._on_batch = on_batch
        self._flying: deque[_InFlight] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servax-device", daemon=True)
        self.beat_s = clock.now()
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after what is in flight; False if it did not within the timeout."""
        self._stop.set()
        if not self.alive:
            return True
        self._thread.join(timeout_s)
        return not self.alive

    def _run(self) -> None:
        compile_log().mark_thread(REQUEST)
        try:
            while self._turn():
                pass
        except BaseException as error:  # a bug of ours: health must show it, callers must not hang
            self.failure = error
            self._dispatcher.close()
            raise

    def _turn(self) -> bool:
        """One step: launch something, or finish the oldest batch, or end."""
        self.beat_s = self._clock.now()
        work: Any = None
        if len(self._flying) < self._depth:
            work = self._dispatcher.take(0.0 if self._flying else HEARTBEAT_S)
        if isinstance(work, Work):
            self._launch(work)
        elif isinstance(work, Probe):
            self._probe(work)
        elif self._flying:
            self._finish(self._flying.popleft())
        elif self._stop.is_set():
            return False
        return True

    def _launch(self, work: Work) -> None:
        model, launch = self._models[work.lane], work.launch
        staging = model.borrow_staging(launch.bucket)
        begin_s = self._clock.now()
        try:
            leaves = _start(model, launch.bucket, staging, launch.rows)
        except Exception as error:
            model.return_staging(launch.bucket, staging)
            self._isolate(model, launch.bucket, launch.rows, error)
            return
        self._flying.append(
            _InFlight(model, launch.bucket, launch.rows, staging, leaves, begin_s, launch.reason)
        )

    def _finish(self, batch: _InFlight) -> None:
        try:
            outputs = _fetch(batch.model, batch.bucket, batch.leaves, batch.rows)
        except Exception as error:
            batch.model.return_staging(batch.bucket, batch.staging)
            self._isolate(batch.model, batch.bucket, batch.rows, error)
            return
        batch.model.return_staging(batch.bucket, batch.staging)
        seconds = self._clock.now() - batch.launched_s
        if self._depth == 1 and seconds > 0:
            # With several in flight the time includes the batch before: no measurement of this bucket.
            batch.model.cost.observe(batch.bucket, seconds)
        self._dispatcher.finish(batch.rows, outputs)
        if self._on_batch is not None:
            self._on_batch(_record(batch, seconds))

    def _isolate(self, model: Model, bucket: Bucket, rows: Sequence[Row], error: Exception) -> None:
        """Find the rows that fail by halving; the others get their answers.

        One culprit among n rows costs 2 log2(n) more runs; the budget of twice that ends the search when
        much more is wrong than single rows.
        """
        budget = 4 * max(1, math.ceil(math.log2(max(2, len(rows)))))
        todo: list[tuple[Sequence[Row], Exception]] = [(rows, error)]
        while todo:
            group, cause = todo.pop()
            if len(group) == 1 or budget < 2 or isinstance(cause, OutputError | SealedError):
                self._dispatcher.fail(group, _model_error(model, bucket, cause))
                continue
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                budget -= 1
                staging = model.borrow_staging(bucket)
                try:
                    outputs = _fetch(model, bucket, _start(model, bucket, staging, half), half)
                except Exception as failure:
                    todo.append((half, failure))
                else:
                    self._dispatcher.finish(half, outputs)
                finally:
                    model.return_staging(bucket, staging)

    def _probe(self, probe: Probe) -> None:
        """Run a new program on padding: twice, since the first call pays for setting buffers up."""
        bucket = probe.program.bucket
        staging = probe.model.borrow_staging(bucket)
        try:
            for _ in range(2):
                begin = time.perf_counter()
                _fetch(probe.model, bucket, _start(probe.model, bucket, staging, ()), ())
                seconds = time.perf_counter() - begin
            probe.model.opened(bucket, seconds)
        except BaseException as error:  # the warm-up thread reports it under the bucket's name
            probe.seconds.set_exception(error)
        else:
            probe.seconds.set_result(seconds)
        finally:
            probe.model.return_staging(bucket, staging)


def _start(model: Model, bucket: Bucket, staging: Staging, rows: Sequence[Row]) -> list[jax.Array]:
    inputs = staging.fill([row.item for row in rows], [row.sizes for row in rows])
    with explain_sealed(f"model {model.name!r} in bucket {bucket}"):
        return model.cache.get(bucket)(inputs)


def _fetch(
    model: Model, bucket: Bucket, leaves: Sequence[jax.Array], rows: Sequence[Row]
) -> list[list[np.ndarray]]:
    arrays = [np.asarray(leaf) for leaf in leaves]
    outputs = model.servable.outputs
    outputs.check_batch(arrays, bucket.rows)
    return outputs.cut(arrays, [row.sizes for row in rows])


def _model_error(model: Model, bucket: Bucket, cause: Exception) -> ModelError:
    first_line = (str(cause).strip() or type(cause).__name__).split("\n", 1)[0]
    error = ModelError(f"model {model.name!r} failed on this request in bucket {bucket}: {first_line}")
    error.__cause__ = cause
    return error


def _record(batch: _InFlight, seconds: float) -> BatchRecord:
    return BatchRecord(
        model=batch.model.name,
        bucket=batch.bucket,
        rows=len(batch.rows),
        real=sum(math.prod(row.sizes) for row in batch.rows),
        computed=batch.bucket.elements,
        seconds=seconds,
        reason=batch.reason,
        queued_s=tuple(batch.launched_s - row.request.arrived_s for row in batch.rows),
    )
