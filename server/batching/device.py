"""The device thread: the only one that launches programs.

It takes what the dispatcher chose, runs it and reports. Nothing a model does ends it: a failing batch is
bisected, so that only the culprit's caller sees the error.
"""

import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ...bucketing import Bucket, Grid
from ...jit_cache import REQUEST, OutputError, Program, SealedError, compile_log
from ..errors import ConfigError, ModelError, Unavailable
from ..hosting.model import Model
from .batch import Batch, BatchRecord, nan_error, nan_rows
from .clock import Clock
from .dispatcher import Dispatcher, Work
from .request import Row

__all__ = ["BatchRecord", "DeviceLoop", "Probe"]

_log = logging.getLogger(__name__)
_SHORT_RUN_S = 0.05


@dataclass(frozen=True, slots=True)
class Probe:
    """A warm-up run of one program through the same path as requests, on padding only.

    The run time of a program that came from the store is known from an earlier start.
    """

    model: Model
    program: Program
    seconds: "Future[float]"

    def fail(self, error: Exception) -> None:
        """It will not be run."""
        self.seconds.set_exception(error)


@dataclass(frozen=True, slots=True)
class Swap:
    """Another grid for a model, to be put in place between two batches."""

    model: Model
    grid: Grid
    done: "Future[None]"

    def fail(self, error: Exception) -> None:
        """It will not be done."""
        self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Retire:
    """A model that gave way; let it go once the last of its requests has landed."""

    model: Model
    done: "Future[None]"

    def fail(self, error: Exception) -> None:
        """The server ends, and with it the model."""
        self.done.set_exception(error)


class DeviceLoop:
    """Runs what the dispatcher chooses, until the dispatcher is closed.

    Args:
        dispatcher: where work comes from and results go.
        models: by lane.
        clock: source of time.
        depth: batches in flight; 2 hides launch costs on accelerators, 1 batches best on a CPU.
        on_batch: told of each batch that gave answers, in the device thread; must not block.
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
        if depth < 1:
            raise ConfigError(f"depth is at least 1 batch in flight; got {depth}: leave it out")
        self._dispatcher, self._models, self._clock = dispatcher, models, clock
        self._depth = depth
        self._on_batch = on_batch
        self._flying: deque[Batch] = deque()
        self._retiring: list[Retire] = []
        self._thread = threading.Thread(target=self._run, name="servax-device", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def current(self) -> bool:
        """Whether the caller is the device thread."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after the dispatcher was closed; False if it did not come in time."""
        if self.alive:
            self._thread.join(timeout_s)
        return not self.alive

    def _run(self) -> None:
        compile_log().mark_thread(REQUEST)
        try:
            while self._turn():
                pass
        except BaseException as error:  # a bug of ours: health must show it, callers must not hang
            self.failure = error
            _log.critical("the device thread ended", exc_info=error)
            self._dispatcher.close(functools.partial(_unavailable, error))

    def _turn(self) -> bool:
        """One step: launch something, or finish the oldest batch, or end."""
        work = None
        if len(self._flying) < self._depth:
            work = self._dispatcher.take(block=not self._flying)
        if isinstance(work, Work):
            self._launch(self._models[work.lane], work.launch.bucket, work.launch.rows, work.launch.reason)
        elif isinstance(work, Probe):
            self._probe(work)
        elif isinstance(work, Swap):
            self._swap(work)
        elif isinstance(work, Retire):
            self._retiring.append(work)
            self._dispatcher.finish((), ())
        elif self._flying:
            self._finish(self._flying.popleft())
        else:
            return False
        if self._retiring:
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Models that gave way leave with their last request."""
        for job in list(self._retiring):
            waiting, running = job.model.own_load()
            if not waiting and not running:
                self._retiring.remove(job)
                job.model.unload()
                job.done.set_result(None)

    def _launch(self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str) -> None:
        try:
            batch = Batch(model, bucket, rows, reason, self._clock.now())
        except Exception as error:
            self._isolate(model, bucket, rows, reason, error)
        else:
            self._flying.append(batch)
            if not model.keeper.residency.complete:
                model.keeper.launched(
                    len(rows), tuple(map(max, zip(*[row.sizes for row in rows], strict=True)))
                )

    def _finish(self, batch: Batch) -> None:
        try:
            outputs = batch.fetch()
        except Exception as error:
            self._isolate(batch.model, batch.bucket, batch.rows, batch.reason, error)
        else:
            self._report(batch, outputs)

    def _report(self, batch: Batch, outputs: list[list[np.ndarray]]) -> None:
        seconds = self._clock.now() - batch.launched_s
        rows: Sequence[Row] = batch.rows
        if batch.model.checks_outputs and (bad := nan_rows(outputs)):
            self._dispatcher.fail([rows[place] for place in sorted(bad)], functools.partial(nan_error, batch))
            good = [place for place in range(len(rows)) if place not in bad]
            rows, outputs = [rows[place] for place in good], [outputs[place] for place in good]
        self._dispatcher.finish(rows, outputs)
        if batch.model.traffic is not None:
            batch.model.traffic.add([row.sizes for row in batch.rows], batch.launched_s)
        if self._depth == 1 and seconds > 0:
            # With several in flight the time includes the batch before: no measurement of this bucket.
            batch.model.cost.observe(batch.bucket, seconds)
        if self._on_batch is not None:
            try:
                self._on_batch(batch.record(seconds))
            except Exception:  # somebody else's code; it may cost a number, but not the loop
                _log.exception("on_batch failed")

    def _isolate(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        """Find the rows that fail by halving; the others get their answers.

        Halves run in the smallest bucket that holds them, so that one too large for the memory is left too.
        One culprit among n rows costs 2 log2(n) more runs; the budget of twice that, and of two for each half
        that works, ends the search when much more is wrong than single rows.
        """
        budget = 4 * math.ceil(math.log2(max(2, len(rows))))
        todo: deque[tuple[Sequence[Row], Exception]] = deque([(rows, error)])
        while todo:
            group, cause = todo.popleft()
            if len(group) == 1 or budget < 2 or isinstance(cause, OutputError | SealedError):
                self._dispatcher.fail(group, functools.partial(_model_error, model, bucket, cause))
                continue
            budget -= 2
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                try:
                    batch = Batch(model, model.smallest(bucket, half), half, reason, self._clock.now())
                    outputs = batch.fetch()
                except Exception as failure:
                    todo.append((half, failure))
                else:
                    self._report(batch, outputs)
                    budget += 2  # a half that works is worth going on for: the culprits are few

    def _probe(self, probe: Probe) -> None:
        """Time a new program on padding; a short run twice, since the first pays for setting buffers up."""
        while self._flying:  # or their time would be counted as the program's
            self._finish(self._flying.popleft())
        known_s = probe.program.facts.run_s
        try:
            # Known from an earlier start: a short program runs once, so that no request is its first; one
            # that takes long hides what a first run costs.
            if known_s is None or known_s < _SHORT_RUN_S:
                seconds = self._time(probe)
                if known_s is None and seconds < _SHORT_RUN_S:
                    seconds = self._time(probe)
            if known_s is not None:
                seconds = known_s
            probe.model.opened(probe.program.bucket, seconds)
        except Exception as error:  # the warm-up thread reports it under the bucket's name
            probe.fail(error)
        else:
            probe.seconds.set_result(seconds)
        finally:
            self._dispatcher.finish((), ())

    def _swap(self, swap: Swap) -> None:
        while self._flying:  # they hold buffers of buckets that may leave
            self._finish(self._flying.popleft())
        try:
            swap.model.swap(swap.grid)
        except Exception as error:  # the re-fit's thread reports it; the old grid stays
            swap.fail(error)
        else:
            swap.done.set_result(None)
        finally:
            self._dispatcher.finish((), ())

    def _time(self, probe: Probe) -> float:
        begin_s = self._clock.now()
        Batch(probe.model, probe.program.bucket, (), "probe", begin_s).fetch()
        return self._clock.now() - begin_s


def _model_error(model: Model, bucket: Bucket, cause: Exception) -> ModelError:
    first_line = (str(cause).strip() or type(cause).__name__).split("\n", 1)[0]
    error = ModelError(f"model {model.name!r} failed on this request in bucket {bucket}: {first_line}")
    error.__cause__ = cause
    return error


def _unavailable(cause: BaseException) -> Unavailable:
    error = Unavailable(f"the device thread ended with {type(cause).__name__}: {cause}: restart the server")
    error.__cause__ = cause
    return error
