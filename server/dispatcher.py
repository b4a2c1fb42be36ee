"""The queue between callers and the device thread, and the only place where requests change state.

One lock guards it. Callers post requests and cancel them; the device thread takes launches and reports
results; a timer thread, asleep until the next deadline, expires what is late even while the device is busy.
Final requests are handed to their sinks outside the lock, each exactly once.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .admission import Load, QueueLimits, admit
from .batcher import Batcher, Launch
from .clock import Clock
from .deadlines import Deadlines
from .errors import Closed, DeadlineExceeded, ServerError
from .request import Request, Row, Sink, State

# Longest sleep of either thread; a lost wake-up then costs this much and not forever.
_NAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """A launch and the index of the model it is for."""

    lane: int
    launch: Launch


class Dispatcher:
    """Requests of several models that share one device.

    Args:
        clock: source of time.
        limits: bounds on what may wait.
    """

    def __init__(self, clock: Clock, limits: QueueLimits) -> None:
        self._clock = clock
        self._limits = limits
        self._lanes: list[Batcher] = []
        self._lock = threading.Lock()
        self._device_cond = threading.Condition(self._lock)
        self._timer_cond = threading.Condition(self._lock)
        self._deadlines = Deadlines()
        self._load = Load()
        self._running_rows = 0
        self._live: set[Request] = set()
        self._jobs: deque[object] = deque()
        self._draining = False
        self._closed = False
        self._timer: threading.Thread | None = None

    def add_lane(self, batcher: Batcher) -> int:
        """Serve one more model; returns its index."""
        with self._lock:
            self._lanes.append(batcher)
            return len(self._lanes) - 1

    def load(self) -> tuple[Load, int]:
        """What waits, and how many rows run."""
        with self._lock:
            return self._load, self._running_rows

    def offer(self, lane: int, request: Request) -> None:
        """Admit a request.

        Raises:
            Closed: while draining or closed.
            Overloaded: if a queue limit would be passed.
        """
        with self._lock:
            if self._draining:
                raise Closed(
                    "a draining server takes no new requests; it is shutting down: use another replica"
                )
            self._load = admit(self._limits, self._load, request.waiting_rows, request.waiting_elements)
            self._lanes[lane].add(request)
            self._live.add(request)
            if request.deadline_s < math.inf:
                sooner = request.deadline_s < self._deadlines.next_s()
                self._deadlines.add(request)
                if self._timer is None:
                    self._timer = threading.Thread(target=self._expire_loop, name="servax-timer", daemon=True)
                    self._timer.start()
                elif sooner:
                    self._timer_cond.notify()
            self._device_cond.notify()

    def cancel(self, request: Request) -> bool:
        """Forget a request whose caller went away; False if it had its final state already."""
        with self._lock:
            if request.over:
                return False
            self._finish(request, State.CANCELLED)
            self._deadlines.compact()
            return True

    def post(self, job: object) -> None:
        """Hand the device thread a job that is no request (a warm-up probe); it goes first."""
        with self._lock:
            if self._closed:
                raise Closed("a closed server runs nothing; make a new one")
            self._jobs.append(job)
            self._device_cond.notify()

    def take(self, timeout_s: float) -> Work | object | None:
        """Next work for the device thread, or None once the timeout is over or nothing more will come."""
        give_up_s = self._clock.now() + timeout_s
        with self._lock:
            while True:
                if self._jobs:
                    return self._jobs.popleft()
                now_s = self._clock.now()
                work, until_s = self._choose(now_s)
                if work is not None:
                    return work
                if self._closed or now_s >= give_up_s:
                    return None
                self._device_cond.wait(min(until_s, give_up_s) - now_s)

    def _choose(self, now_s: float) -> tuple[Work | None, float]:
        """The launch of the model whose oldest row waits longest, or when to ask again."""
        until_s = math.inf
        order = sorted((lane.head_s(), index) for index, lane in enumerate(self._lanes))
        for head_s, index in order:
            if head_s == math.inf:
                break
            answer = self._lanes[index].next(now_s)
            if isinstance(answer, Launch):
                for row in answer.rows:
                    self._leave_queue(row)
                self._running_rows += len(answer.rows)
                return Work(index, answer), now_s
            until_s = min(until_s, answer)
        return None, until_s

    def _leave_queue(self, row: Row) -> None:
        request, elements = row.request, math.prod(row.sizes)
        request.waiting_rows -= 1
        request.waiting_elements -= elements
        self._load = self._load.plus(-1, -elements)
        if request.state is State.WAITING:
            request.move(State.RUNNING)

    def finish(self, rows: Sequence[Row], outputs: Sequence[list[np.ndarray]]) -> None:
        """Report the outputs of launched rows, in the same order."""
        done = []
        with self._lock:
            self._running_rows -= len(rows)
            for row, output in zip(rows, outputs, strict=True):
                request = row.request
                if request.over:
                    continue
                request.results[row.index] = output
                request.remaining -= 1
                if request.remaining == 0:
                    self._finish(request, State.DONE)
                    done.append(request)
        deliver(done)

    def fail(self, rows: Sequence[Row], error: ServerError) -> None:
        """Report that launched rows failed; what still waits of their requests is dropped."""
        failed = []
        with self._lock:
            self._running_rows -= len(rows)
            for request in dict.fromkeys(row.request for row in rows):
                if not request.over:
                    # Each caller gets an error of its own: a shared one would collect all their tracebacks.
                    own = type(error)(*error.args)
                    own.__cause__ = error.__cause__
                    self._finish(request, State.FAILED, own)
                    failed.append(request)
        deliver(failed)

    def _finish(self, request: Request, state: State, error: ServerError | None = None) -> None:
        request.move(state, error)
        self._live.discard(request)
        self._load = self._load.plus(-request.waiting_rows, -request.waiting_elements)
        request.waiting_rows = request.waiting_elements = 0

    def expire(self) -> None:
        """Answer every request whose deadline has come, whether it waits or runs."""
        with self._lock:
            late = self._expire_due()
        deliver(late)

    def _expire_due(self) -> list[Request]:
        now_s = self._clock.now()
        late = self._deadlines.due(now_s)
        for request in late:
            allowed_s = request.deadline_s - request.arrived_s
            where = "waiting in the queue" if request.state is State.WAITING else "running"
            error = DeadlineExceeded(
                f"the request was to be answered within {allowed_s:.3g} s and was still {where}: allow more "
                f"time, or retry when there is less load"
            )
            self._finish(request, State.EXPIRED, error)
        return late

    def _expire_loop(self) -> None:
        while True:
            with self._lock:
                wait_s = self._deadlines.next_s() - self._clock.now()
                if wait_s > 0:
                    self._timer_cond.wait(min(wait_s, _NAP_S))
                late = self._expire_due()
                if self._closed and not len(self._deadlines):
                    return
            deliver(late)

    def drain(self) -> None:
        """Take no new requests; those admitted go on."""
        with self._lock:
            self._draining = True

    def close(self) -> None:
        """Fail whatever is left and let both threads end; again: does nothing."""
        with self._lock:
            self._draining = self._closed = True
            for lane in self._lanes:
                lane.clear()
            left = list(self._live)
            for request in left:
                self._finish(
                    request, State.FAILED, Closed("the server closed before it could answer: retry elsewhere")
                )
            self._device_cond.notify_all()
            self._timer_cond.notify_all()
        deliver(left)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return not self._live and self._running_rows == 0


def deliver(requests: Iterable[Request]) -> None:
    """Hand final requests to their sinks, one call for each sink."""
    by_sink: dict[Sink, list[Request]] = {}
    for request in requests:
        by_sink.setdefault(request.sink, []).append(request)
    for sink, group in by_sink.items():
        sink.deliver(group)
