"""The device thread: the only one that launches programs on its device.

It takes what the dispatcher chose, runs it and reports. Nothing a model does ends it; see `recovery`.
"""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...jit_cache import REQUEST, SealedError, compile_log
from ...jit_cache.alive import SHARED
from ...jit_cache.replicas import on_replica
from ..errors import ConfigError, Unavailable
from ..hosting.model import Model
from .batch import Batch, BatchRecord, nan_error, nan_rows
from .batcher import Launch
from .clock import Clock
from .dispatcher import Dispatcher, Job, Work
from .faults import FaultPolicy
from .jobs import SHORT_RUN_S, Probe, Retire, Swap
from .lessons import Lessons
from .recovery import Recovery
from .request import Row
from .work import LetGo, Rerun, Trial

__all__ = ["BatchRecord", "Crew", "DeviceLoop", "Probe", "Retire", "Swap"]

_log = logging.getLogger(__name__)
# A call costs some 0.2 ms of host work: within 10 ms of steps that is no matter, and nobody waits for long.
_JOIN_S = 0.01
# In which an event loop has written the answers of a small batch and read what its clients ask next.
_REST_S = 0.002


@dataclass(frozen=True, slots=True)
class Crew:
    """What the device threads of one server share.

    Attributes:
        size: how many they are.
        turn: held by the one that changes what a model runs, or notes what it learned.
        retiring: models that gave way and still have requests.
    """

    size: int = 1
    turn: "threading.RLock" = field(default_factory=threading.RLock)
    retiring: list[Retire] = field(default_factory=list)


class DeviceLoop:
    """Runs what the dispatcher chooses, until the dispatcher is closed.

    Args:
        dispatcher: where work comes from and results go.
        models: by lane.
        clock: source of time.
        depth: batches in flight; 2 hides launch costs on accelerators, 1 batches best on a CPU.
        on_batch: told of each batch that gave answers, in the device thread; must not block.
        faults: what is done about a device that fails.
        device: index of its device.
        crew: what it shares with the threads of the other devices, if there are some.

    Attributes:
        on_landed: told of each such batch, when it began and how many seconds it took, before its callers
            are; must not raise. None tells nobody.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: Sequence[Model],
        clock: Clock,
        *,
        depth: int,
        on_batch: Callable[[BatchRecord], None] | None = None,
        faults: FaultPolicy | None = None,
        device: int = 0,
        crew: Crew | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth is at least 1 batch in flight; got {depth}: leave it out")
        self._dispatcher, self._models, self._clock = dispatcher, models, clock
        self._depth = depth
        self.on_landed: Callable[[Batch, float, float], None] | None = None
        self._flying: deque[Batch] = deque()
        self._index = device
        self._crew = crew if crew is not None else Crew()
        self._held: Work | Job | None = None
        self._lessons = Lessons(self._crew.turn, on_batch)
        policy = faults if faults is not None else FaultPolicy()
        self.recovery = Recovery(dispatcher, clock, policy, self._report, device, self._crew.size)
        name = f"servax-device-{device}" if self._crew.size > 1 else "servax-device"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
            with on_replica(self._index):
                while self._turn():
                    pass
        except BaseException as error:  # a bug of ours: health must show it, callers must not hang
            self.failure = error
            if self._held is not None and not isinstance(self._held, Work):
                self._held.fail(_unavailable(error))
            _log.critical("the device thread ended", exc_info=error)
            self._dispatcher.close(functools.partial(_unavailable, error))

    def _turn(self) -> bool:
        """One step: launch something, or finish the oldest batch, or end."""
        work, self._held = self._held, None
        more = True
        if work is None and self._in_flight < self._depth:
            work = self._next()
        if isinstance(work, Work):
            self._launch(self._models[work.lane], self._joined(work))
        self._lessons.learn()
        if isinstance(work, Probe):
            self._probe(work)
        elif isinstance(work, Swap):
            self._swap(work)
        elif isinstance(work, Retire):
            with self._crew.turn:
                self._crew.retiring.append(work)
        elif isinstance(work, Trial):
            self.recovery.try_device()
        elif isinstance(work, Rerun):
            self.recovery.rerun(self._models[work.lane], work)
        elif work is None and self._flying:
            self._finish(self._flying.popleft())
        elif work is None:
            more = False
        if isinstance(work, (Retire, LetGo, Trial)):
            self._done()
        if self._crew.retiring:
            self._let_go()
        return more

    def _next(self) -> Work | Job | None:
        """What to do next; before the device idles, what landed is learned from."""
        if self._lessons and not self._flying:
            if self._lessons.loops_wait:
                self._dispatcher.rest(_REST_S, self._index)
            elif not self._dispatcher.waits:
                self._lessons.learn()
            work = self._dispatcher.take(block=False, device=self._index)
            if work is not None:
                return work
            self._lessons.learn()
        return self._dispatcher.take(block=not self._flying, device=self._index)

    def _done(self) -> None:
        """A job was done."""
        self._dispatcher.finish((), (), self._index)

    def _let_go(self) -> None:
        """Models that gave way leave with their last request."""
        with self._crew.turn:
            for job in list(self._crew.retiring):
                if job.model.leave():
                    self._crew.retiring.remove(job)
                    job.done.set_result(None)

    @property
    def _in_flight(self) -> int:
        """Calls that are in flight; batches that share one count once."""
        return sum(batch.last for batch in self._flying)

    def _joined(self, work: Work) -> list[Launch]:
        """A launch with those that may share its call: the next ones, as long as they are short."""
        launches = [work.launch]
        model = self._models[work.lane]
        left_s = _JOIN_S - model.cost.seconds(work.launch.bucket)
        for _ in range(model.most_steps(work.launch.bucket) - 1):
            if left_s <= 0 or self._dispatcher.devices.others_free(self._index):
                break
            more = self._held = self._dispatcher.take(block=False, device=self._index)
            if not (isinstance(more, Work) and more.lane == work.lane):
                break
            if model.most_steps(more.launch.bucket) < 2:
                break
            launches.append(more.launch)
            self._held = None
            left_s -= model.cost.seconds(more.launch.bucket)
        return launches

    def _launch(self, model: Model, launches: Sequence[Launch]) -> None:
        now_s = self._clock.now()
        try:
            batches = Batch.together(model, launches, now_s)
        except Exception as error:
            if len(launches) > 1 and isinstance(error, SealedError):
                # Another device's thread put another grid in place; some of them may still be in it.
                for one in launches:
                    self._launch(model, [one])
                return
            for one in launches:
                self.recovery.recover(model, one.bucket, one.rows, one.reason, error)
            return
        self._flying.extend(batches)
        if not model.keeper.residency.complete:
            with self._crew.turn:
                for one in launches:
                    model.keeper.launched(*model.box(one.bucket, one.rows))

    def _finish(self, batch: Batch) -> None:
        try:
            outputs = batch.fetch()
        except Exception as error:
            self._lessons.free_s = self._clock.now()
            self.recovery.recover(batch.model, batch.bucket, batch.rows, batch.reason, error)
        else:
            self._report(batch, outputs)

    def _report(self, batch: Batch, outputs: list[list[np.ndarray]]) -> None:
        begin_s, seconds = batch.span(self._clock.now())
        self.recovery.worked(batch.model, batch.bucket)
        if self.on_landed is not None:
            self.on_landed(batch, begin_s, seconds)
        rows: Sequence[Row] = batch.rows
        if batch.model.checks_outputs and (bad := nan_rows(outputs)):
            ill = [rows[place] for place in sorted(bad)]
            self._dispatcher.fail(ill, functools.partial(nan_error, batch), self._index)
            good = [place for place in range(len(rows)) if place not in bad]
            rows, outputs = [rows[place] for place in good], [outputs[place] for place in good]
        self._dispatcher.finish(rows, outputs, self._index)
        self._lessons.add(batch, begin_s, seconds)

    def _probe(self, probe: Probe) -> None:
        """Time a new program on a full batch, and have the model run it."""
        while self._flying:  # or their time would be counted as the program's
            self._finish(self._flying.popleft())
        self._lessons.learn()  # of the program that this one may replace
        known_s = probe.program.facts.run_s if probe.purpose == "open" else None
        try:
            # Known from an earlier start: a short program runs once, so that no request is its first; one
            # that takes long hides what a first run costs, and one that is shared had it.
            shared = probe.program.facts.source == SHARED
            if known_s is None or (known_s < SHORT_RUN_S and not shared):
                probe.times.append(self._time(probe))
            if known_s is None and probe.unsure:
                self._dispatcher.post(probe)  # a batch that waits goes between
                return
            seconds = known_s if known_s is not None else min(probe.times)
            if probe.purpose != "again":
                self._warm_others(probe)
            with self._crew.turn:
                probe.tell(seconds)
        except Exception as error:  # the warm-up thread reports it under the bucket's name
            probe.fail(error)
        else:
            probe.seconds.set_result(seconds)
        finally:
            self._done()

    def _warm_others(self, probe: Probe) -> None:
        """The first run on every other device, so that no request is it."""
        for index in range(self._crew.size):
            if index != self._index:
                with on_replica(index):
                    self._time(probe)

    def _swap(self, swap: Swap) -> None:
        while self._flying:  # they hold buffers of buckets that may leave
            self._finish(self._flying.popleft())
        try:
            with self._crew.turn:
                swap.model.swap(swap.grid)
        except Exception as error:  # the re-fit's thread reports it; the old grid stays
            swap.fail(error)
        else:
            swap.done.set_result(None)
        finally:
            self._done()

    def _time(self, probe: Probe) -> float:
        begin_s = self._clock.now()
        Batch(probe.model, probe.program.bucket, (), "probe", begin_s, program=probe.program).fetch()
        return self._clock.now() - begin_s


def _unavailable(cause: BaseException) -> Unavailable:
    said = f"the device thread ended with {type(cause).__name__}: {cause}: restart the server"
    error = Unavailable(said, lasting=True)
    error.__cause__ = cause
    return error
