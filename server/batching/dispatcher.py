"""The queue between callers and the device thread, and the only place where requests change state.

One lock guards it. Callers post requests and cancel them; the device thread takes launches and reports
results; a timer thread, asleep until the next deadline, expires what is late even while the device is busy.
Final requests are handed to their sinks outside the lock, each exactly once.
"""

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..context import client_of_call
from ..errors import Closed, ServerError, Unavailable
from .admission import Load, QueueLimits, closed, displaced, draining
from .batcher import Batcher, Launch
from .clock import Clock
from .forecast import Forecast
from .ledger import Ledger
from .request import Request, Row, State
from .sinks import deliver
from .turns import Turns
from .watch import Watch
from .work import Job, Work

__all__ = ["Dispatcher", "Job", "MakeError", "Work"]

_log = logging.getLogger(__name__)

MakeError = Callable[[], ServerError]


class Dispatcher:
    """Requests of several models that share one device.

    Args:
        clock: source of time.
        limits: bounds on what may wait.
        stall_s: a device that finishes nothing of what it holds for so long is taken for hung: whoever
            waits is told so, and new requests are refused until it comes back.
    """

    def __init__(self, clock: Clock, limits: QueueLimits, *, stall_s: float = math.inf) -> None:
        self._clock = clock
        self._lanes: list[Batcher] = []
        self._turns = Turns()
        self._ledger = Ledger(limits)
        self._watch = Watch(stall_s)
        self._forecast = Forecast()
        self._shares = limits.client_rows is not None
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._device_cond = threading.Condition(self._lock)
        self._timer_cond = threading.Condition(self._lock)
        self._idle_cond = threading.Condition(self._lock)
        self._device_sleeps = False
        self._timer_until_s = math.inf
        self._closed = False
        self._refusal: MakeError | None = None

    def add_lane(self, batcher: Batcher) -> int:
        """Serve one more model; returns its index."""
        with self._lock:
            self._lanes.append(batcher)
            self._ledger.add_lane()
            self._forecast.add_lane()
            return self._turns.add()

    def start(self) -> None:
        """Begin to keep time in a thread; without it `expire` must be called."""
        threading.Thread(target=self._keep_time, name="servax-timer", daemon=True).start()

    def load(self, lane: int | None = None) -> tuple[Load, int]:
        """What waits and how many rows run, over all models; of a single one only its rows."""
        with self._lock:
            if lane is None:
                return self._ledger.load.copy(), sum(self._ledger.running)
            return Load(self._ledger.waiting[lane]), self._ledger.running[lane]

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return self._ledger.idle

    @property
    def stalled(self) -> bool:
        """Whether the device holds work and has finished none for too long."""
        return self._watch.stalled

    # -- callers ------------------------------------------------------------------------------------

    def offer(self, lane: int, request: Request) -> None:
        """Admit a request; if the queue is full, in the place of less urgent ones.

        Raises:
            Unavailable: while the device is stalled, or (as `Closed`) while draining or closed.
            Overloaded: if a queue limit would be passed, or the answer is predicted to come too late.
            TooManyRows, PayloadTooLarge: if it would not fit into an empty queue either.
        """
        request.lane = lane
        if self._shares:
            request.client = client_of_call()
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if self._watch.stalled:
                raise self._watch.stall_error()
            # If nothing waits it is let in whatever is predicted, or a wrong cost shut all out for good.
            if self._ledger.load.rows:
                self._forecast.check(request, self._ledger.ahead)
            victims = self._ledger.admit(
                request,
                lambda: self._less_urgent(request.priority),
                lambda: self._forecast.drain_s(self._ledger.ahead, request.arrived_s),
            )
            for victim in victims:
                retry_s = self._forecast.drain_s(self._ledger.ahead, request.arrived_s)
                self._end(victim, State.FAILED, displaced(retry_s))
            self._lanes[lane].add(request)
            self._watch.add(request)
            if request.deadline_s < self._timer_until_s:
                self._timer_until_s = request.deadline_s
                self._timer_cond.notify()
            self._wake_device()
        if victims:
            deliver(victims)

    def _less_urgent(self, priority: int) -> Iterator[Request]:
        return itertools.chain.from_iterable(lane.less_urgent(priority) for lane in self._lanes)

    def cancel(self, request: Request) -> bool:
        """Forget a request whose caller went away; False if it had its final state already."""
        with self._lock:
            if request.over:
                return False
            self._end(request, State.CANCELLED)
            return True

    def post(self, job: Job) -> None:
        """Hand the device thread a job; it goes first.

        Raises:
            Closed: if nothing more will run.
        """
        with self._lock:
            if self._closed:
                raise Closed("a closed server runs nothing; make a new one")
            self._jobs.append(job)
            self._wake_device()

    def _wake_device(self) -> None:
        if self._device_sleeps:
            self._device_sleeps = False  # one notification is enough
            self._device_cond.notify()

    # -- the device thread --------------------------------------------------------------------------

    def take(self, *, block: bool) -> Work | Job | None:
        """Next work; None if there is none now or, when blocking, if nothing more will come."""
        while True:
            with self._lock:
                now_s = self._clock.now()
                late = self._expire(now_s)
                if not late:
                    found, until_s = self._choose(now_s)
                    if found is not None:
                        self._watch.device_took(now_s)
                        return found
                    if self._closed or not block:
                        return None
                    self._device_sleeps = True
                    self._clock.wait(self._device_cond, until_s)
                    self._device_sleeps = False
            deliver(late)

    def _choose(self, now_s: float) -> tuple[Work | Job | None, float]:
        """What runs next, or when to ask again."""
        if self._jobs:
            return self._jobs.popleft(), now_s
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
                return Work(lane, answer), now_s
            until_s = min(until_s, answer)
        return None, until_s

    def finish(self, rows: Sequence[Row], outputs: Sequence[list[np.ndarray]]) -> None:
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
                    done.append(request)
            self._landed(rows)
        deliver(done)

    def fail(self, rows: Sequence[Row], make_error: MakeError) -> None:
        """Report that launched rows failed; what still waits of their requests is dropped.

        Each caller gets an error of its own: a shared one would collect all their tracebacks.
        """
        failed = []
        with self._lock:
            for request in dict.fromkeys([row.request for row in rows]):
                if not request.over:
                    self._end(request, State.FAILED, make_error())
                    failed.append(request)
            self._landed(rows)
        deliver(failed)

    def _landed(self, rows: Sequence[Row]) -> None:
        self._ledger.land(rows)
        now_s, busy = self._clock.now(), self._ledger.busy
        self._watch.device_came_back(now_s, busy=busy)
        self._forecast.landed(now_s, busy=busy)
        if self._ledger.idle:
            self._idle_cond.notify_all()

    def _end(self, request: Request, state: State, error: ServerError | None = None) -> None:
        dropped = self._ledger.end(request, state, error)
        if dropped:
            self._lanes[request.lane].forget(dropped)
            if self._ledger.idle:
                self._idle_cond.notify_all()

    # -- time and the end ---------------------------------------------------------------------------

    def expire(self) -> None:
        """Answer every request whose time is up, whether it waits or runs."""
        with self._lock:
            late = self._expire(self._clock.now())
        deliver(late)

    def _expire(self, now_s: float) -> list[Request]:
        verdicts = self._watch.verdicts(now_s, self._ledger.live)
        for request, state, error in verdicts:
            self._end(request, state, error)
        return [request for request, _, _ in verdicts]

    def _keep_time(self) -> None:
        try:
            while not self._closed:
                with self._lock:
                    now_s = self._clock.now()
                    late = self._expire(now_s)
                    if not late and not self._closed:
                        next_s = self._watch.next_s(now_s)
                        # Kept if it is yet to come, though its request may have ended: else quick answers
                        # would have every newcomer wake this thread.
                        if not now_s < self._timer_until_s < next_s:
                            self._timer_until_s = next_s
                        self._clock.wait(self._timer_cond, self._timer_until_s)
                deliver(late)
        except BaseException as error:  # a bug of ours: without time nobody would be told anything
            _log.critical("the timer thread ended", exc_info=error)
            self.close(lambda: Unavailable("the timer thread ended: restart the server"))

    def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        with self._lock:
            if self._refusal is None:
                self._refusal = draining

    def wait_idle(self, timeout_s: float) -> bool:
        """Sleep until nothing waits and nothing runs, the timeout, or the close; whether it is idle."""
        with self._lock:
            until_s = self._clock.now() + timeout_s
            while not (self._ledger.idle or self._closed) and self._clock.now() < until_s:
                self._clock.wait(self._idle_cond, until_s)
            return self._ledger.idle

    def drop_waiting(self, lane: int, make_error: MakeError) -> None:
        """Fail whatever waits for a model that cannot answer; what runs goes on."""
        with self._lock:
            waiting = [one for one in self._ledger.live if one.lane == lane and one.state is State.WAITING]
            for request in waiting:
                self._end(request, State.FAILED, make_error())
        deliver(waiting)

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
            for condition in (self._device_cond, self._timer_cond, self._idle_cond):
                condition.notify_all()
        deliver(left)
        for job in jobs:
            job.fail(closed())
