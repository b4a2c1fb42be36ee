"""The queue between callers and device threads, and the only place where requests change state.

One lock guards it. Callers post requests and cancel them; a device thread takes launches and reports
results; a timer thread, asleep until the next deadline, expires what is late even while the device is busy.
Final requests are handed to their sinks outside the lock, each exactly once.
"""

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..context import client_of_call
from ..errors import Closed, Left, ServerError, Unavailable
from .admission import QueueLimits, closed, displaced, draining
from .batcher import Batcher, Launch
from .clock import Clock
from .deadlines import Deadlines
from .devices import Device, Devices
from .failover import MakeError
from .faults import FaultPolicy
from .forecast import Forecast
from .lanes import Lanes
from .ledger import Ledger
from .request import Request, Row, State
from .sinks import deliver
from .timer import Timer
from .turns import Turns
from .watch import expired
from .work import Job, Rerun, Trial, Work

__all__ = ["Dispatcher", "Job", "MakeError", "Work"]


class Dispatcher(Lanes):
    """Requests of several models that share one device, or several of which each can run all of them.

    Args:
        clock: source of time.
        limits: bounds on what may wait.
        stall_s: a device that finishes nothing of what it holds for so long is taken for hung: whoever
            waits is told so, and new requests are refused until it comes back.
        faults: when a device that fails is taken for broken, which is told likewise, and when it is tried.
        devices: how many there are, each with a thread that takes work. While one of them is able, those
            that hang or fail are only left out.

    Attributes:
        trace_of_call: asked at each request for what its batches are noted in; None traces nothing.
    """

    def __init__(
        self,
        clock: Clock,
        limits: QueueLimits,
        *,
        stall_s: float = math.inf,
        faults: FaultPolicy | None = None,
        devices: int = 1,
    ) -> None:
        self._clock = clock
        self._lanes, self._free, self._leaving, self._turns = [], [], set(), Turns()
        self._ledger = Ledger(limits)
        self._deadlines = Deadlines()
        self._forecast = Forecast()
        self._shares = limits.client_rows is not None or limits.fair
        self.trace_of_call: Callable[[], Any] | None = None
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._devices = Devices(devices, stall_s, faults if faults is not None else FaultPolicy(), self._lock)
        self._forecast.devices = devices
        self._timer = Timer(
            clock, self._lock, self._expire, lambda now_s: min(self._deadlines.next_s(), now_s + stall_s)
        )
        self._idle_cond = threading.Condition(self._lock)
        self._closed = False
        self._refusal: MakeError | None = None

    def start(self) -> None:
        """Begin to keep time in a thread; without it `expire` must be called."""
        why = "the timer thread ended: restart the server"
        self._timer.start(lambda: self.close(lambda: Unavailable(why, lasting=True)))

    # -- callers ------------------------------------------------------------------------------------

    def offer(self, lane: int, request: Request, batcher: Batcher | None = None) -> None:
        """Admit a request; if the queue is full, in the place of less urgent ones.

        Args:
            lane: index of its model.
            request: what is admitted.
            batcher: of the model, which may have left meanwhile; None if it cannot have.

        Raises:
            Left: if the lane is the model's no more.
            Unavailable: while the device is stalled, or (as `Closed`) while draining or closed.
            Overloaded: if a queue limit would be passed, or the answer is predicted to come too late.
            TooManyRows, PayloadTooLarge: if it would not fit into an empty queue either.
        """
        request.lane = lane
        if self._shares:
            request.client = client_of_call()
        if self.trace_of_call is not None:
            request.trace = self.trace_of_call()
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if self._devices.none_able():
                raise self._devices.error()
            if batcher is not None and self._lanes[lane] is not batcher:
                raise Left("a model that gave way takes no more requests: its successor does")
            # If nothing waits it is let in whatever is predicted, or a wrong cost shut all out for good.
            if self._ledger.load.rows:
                self._forecast.check(request, self._ledger.ahead, self._ledger.share(request))
            victims = self._ledger.admit(
                request,
                lambda: self._less_urgent(request.priority),
                lambda: self._forecast.drain_s(self._ledger.ahead, request.arrived_s),
            )
            for victim in victims:
                retry_s = self._forecast.drain_s(self._ledger.ahead, request.arrived_s)
                self._end(victim, State.FAILED, displaced(retry_s))
            self._lanes[lane].add(request)
            self._deadlines.add(request)
            if request.deadline_s < self._timer.until_s:
                self._timer.hurry(request.deadline_s)
            self._devices.wake()
        if victims:
            deliver(victims)

    def _less_urgent(self, priority: int) -> Iterator[Request]:
        return itertools.chain.from_iterable(lane.less_urgent(priority) for lane in self._lanes)

    def cancel(self, request: Request) -> bool:
        """Forget a request whose caller went away; False if it had its final state already."""
        with self._lock:
            if request.over:
                return False
            self._forecast.left(request, self._clock.now())
            self._end(request, State.CANCELLED)
            return True

    def post(self, job: Job) -> None:
        """Hand a device thread a job; it goes first, but lets a batch that waits go after another job.

        Raises:
            Closed: if nothing more will run.
        """
        with self._lock:
            if self._closed:
                raise Closed("a closed server runs nothing; make a new one")
            self._jobs.append(job)
            self._devices.wake(unable_too=not self._devices.able)

    # -- a device thread, which gives its index -----------------------------------------------------

    def take(self, *, block: bool, device: int = 0) -> Work | Job | None:
        """Next work; None if there is none now or, when blocking, if nothing more will come."""
        mine = self._devices[device]
        while True:
            with self._lock:
                now_s = self._clock.now()
                late = self._expire(now_s)
                if not late:
                    found, until_s = self._choose(now_s, mine)
                    if found is not None:
                        mine.took(now_s, found.rows if isinstance(found, (Work, Rerun)) else ())
                        return found
                    if self._closed or not block:
                        return None
                    mine.sleeps = True
                    self._clock.wait(mine.cond, until_s)
                    mine.sleeps = False
            deliver(late)

    @property
    def waits(self) -> bool:
        """Whether a row waits for a device; a moment's look, without the lock."""
        return self._ledger.load.rows > 0

    def rest(self, at_most_s: float, device: int = 0) -> None:
        """Leave the interpreter to others for so many seconds, unless there is work, or until there is."""
        mine = self._devices[device]
        with self._lock:
            if not (self._ledger.load.rows or self._jobs or self._closed):
                mine.sleeps = True
                mine.cond.wait(at_most_s)  # real time: it is the interpreter that is spared
                mine.sleeps = False

    def _choose(self, now_s: float, device: Device) -> tuple[Work | Job | None, float]:
        """What runs next, or when to ask again."""
        breaker = device.breaker
        job = next((one for one in self._jobs if not (breaker.shut_out and isinstance(one, Rerun))), None)
        # A new version comes with many jobs, one after another: those who wait go between.
        yields = device.did_job and not (breaker.shut_out or isinstance(job, Rerun))
        if job is not None and not yields:
            self._jobs.remove(job)
            return job, now_s
        if breaker.shut_out:
            return (Trial(), now_s) if breaker.try_now(now_s) else (None, breaker.next_s())
        until_s = math.inf
        for lane in self._turns.order():
            batcher = self._lanes[lane]
            answer = batcher.next(now_s)
            if isinstance(answer, Launch):
                seconds = batcher.cost.seconds(answer.bucket)
                self._turns.charge(lane, seconds)
                elements = self._ledger.launch(lane, answer.rows)
                more = self._ledger.load.rows > 0
                self._forecast.launched(lane, elements, seconds, now_s, more=more)
                if more:
                    self._devices.wake()
                return Work(lane, answer), now_s
            until_s = min(until_s, answer)
        if job is not None:
            self._jobs.remove(job)
        return job, until_s

    def finish(self, rows: Sequence[Row], outputs: Sequence[list[np.ndarray]], device: int = 0) -> None:
        """Report the outputs of launched rows, in the same order; of a job, nothing and nothing."""
        done = []
        with self._lock:
            for row, output in zip(rows, outputs, strict=True):
                request = row.request
                if request.over:
                    continue
                request.results[row.index] = output
                request.remaining -= 1
                if request.remaining == 0:
                    self._end(request, State.DONE)
                    if self._forecast.patience.share:
                        self._forecast.patience.answered()
                    done.append(request)
            self._landed(rows, device)
        deliver(done)

    def fail(self, rows: Sequence[Row], make_error: MakeError, device: int = 0) -> None:
        """Report that launched rows failed; what still waits of their requests is dropped.

        Each caller gets an error of its own: a shared one would collect all their tracebacks.
        """
        failed = []
        with self._lock:
            for request in dict.fromkeys([row.request for row in rows]):
                if not request.over:
                    self._end(request, State.FAILED, make_error())
                    failed.append(request)
            self._landed(rows, device)
        deliver(failed)

    def _landed(self, rows: Sequence[Row], device: int) -> None:
        self._ledger.land(rows)
        now_s = self._clock.now()
        if self._devices[device].landed(now_s, rows):
            self._forecast.devices = max(1, self._devices.able)
        self._forecast.landed(now_s, busy=self._ledger.busy)
        if self._ledger.idle:
            self._idle_cond.notify_all()

    def _end(self, request: Request, state: State, error: ServerError | None = None) -> None:
        dropped = self._ledger.end(request, state, error)
        if dropped:
            self._lanes[request.lane].forget(dropped)
            self._emptied(request.lane)
            if self._ledger.idle:
                self._idle_cond.notify_all()

    # -- time and the end ---------------------------------------------------------------------------

    def expire(self) -> None:
        """Answer every request whose time is up, whether it waits or runs."""
        with self._lock:
            late = self._expire(self._clock.now())
        deliver(late)

    def _expire(self, now_s: float) -> list[Request]:
        late = self._deadlines.due(now_s)
        for request in late:
            self._end(request, State.EXPIRED, expired(request))
        hung = self._devices.hung(now_s, self._ledger.live)
        for request in hung:
            self._end(request, State.FAILED, self._devices[0].stall.error())
        if hung:
            self._forecast.devices = max(1, self._devices.able)
        return [*late, *hung]

    def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        with self._lock:
            if self._refusal is None:
                self._refusal = draining

    def close(self, make_error: MakeError | None = None) -> None:
        """Fail whatever is left and let both threads end; again: does nothing.

        Args:
            make_error: what those who wait, and those who still come, hear.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._refusal = make_error if make_error is not None else closed
            left, jobs = list(self._ledger.live), list(self._jobs)
            for request in left:
                self._end(request, State.FAILED, self._refusal())
            self._jobs.clear()
            for lane in self._lanes:
                lane.clear()
            self._timer.end()
            for condition in (self._idle_cond, *[one.cond for one in self._devices.each]):
                condition.notify_all()
        deliver(left)
        for job in jobs:
            job.fail(closed())
