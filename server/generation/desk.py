"""The desk between callers and the device thread: requests and cancellations in, deltas out.

Callers post under one lock and never touch a sequence again; the device thread takes all that came at once,
at the beginning of a step, and hands deltas out at its end, with one wake-up for each event loop. A timer
thread, asleep until the next deadline, tells those whose time is up even while the device hangs; what it told
is ended by the device thread when that comes back, and nothing more is delivered.
"""

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from ..batching.clock import Clock
from ..batching.deadlines import Deadlines
from ..batching.watch import Stall
from ..errors import Closed, DeadlineExceeded, Overloaded, ServerError
from .books import Books
from .output import Delta, join
from .sequence import Generation, State

Event = Delta | ServerError


@dataclass(slots=True)
class News:
    """What came since it was last asked for; `ended` were told why by the timer."""

    added: list[Generation] = field(default_factory=list)
    cancelled: list[Generation] = field(default_factory=list)
    ended: list[tuple[Generation, State, ServerError]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.cancelled or self.ended)


@dataclass(slots=True)
class Load:
    """Sequences that wait and that run, and pages that can be taken, after the last step.

    Attributes:
        waiting: how many wait; `clients` says how many of whom, where that is bounded.
        running: how many run.
        free_pages: that can be taken.
        clients: see `waiting`.
    """

    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    clients: Counter[str] = field(default_factory=Counter)


class LoopSink:
    """Delivers to a callback in an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, put: Callable[[Event], None]) -> None:
        self.loop, self.put = loop, put

    def deliver(self, event: Event) -> None:
        """Hand over in the loop."""
        _post(self.loop, [(self.put, event)])


class Desk:
    """A bounded inbox and an outbox.

    Args:
        clock: source of time.
        max_waiting: requests that wait at most.
        stall_s: a device that finishes no step for so long is taken for hung: whoever waits is told so, and
            new requests are refused until it comes back.
        client_rows: requests of one client that wait at most; None for no bound.
    """

    def __init__(
        self, clock: Clock, max_waiting: int, stall_s: float = math.inf, client_rows: int | None = None
    ) -> None:
        self._clock, self._max_waiting, self._client_rows = clock, max_waiting, client_rows
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._timer_until_s = math.inf
        self._stall = Stall(stall_s)
        self._news = News()
        self._deadlines = Deadlines()
        self._out: list[tuple[Generation, Event]] = []
        self._open, self._closed = True, False
        self._live: set[Generation] = set()
        self._failure: Callable[[], ServerError] | None = None
        self.load = Load()

    @property
    def stalled(self) -> bool:
        """Whether the device hangs."""
        return self._stall.stalled

    # -- callers ------------------------------------------------------------------------------------

    def post(self, one: Generation) -> None:
        """Queue a request.

        Raises:
            Overloaded: too many wait, or too many of its client.
            Unavailable: while the device hangs, or (as `Closed`) while draining or closed.
        """
        with self._lock:
            if not self._open:
                raise self.refusal()
            if self._stall.stalled:
                raise self._stall.error()
            waiting = self.load.waiting + len(self._news.added)
            if waiting >= self._max_waiting:
                raise Overloaded(
                    f"at most {self._max_waiting} requests wait; {waiting} do: retry after 1 s", cause="rows"
                )
            self._check_client(one)
            self._news.added.append(one)
            self._live.add(one)
            self._deadlines.add(cast(Any, one))
            if one.deadline_s < self._timer_until_s:
                self._timer.notify()
            self._changed.notify()

    def _check_client(self, one: Generation) -> None:
        most = self._client_rows
        if most is None or not one.client:
            return
        waiting = self.load.clients[one.client] + sum(new.client == one.client for new in self._news.added)
        if waiting >= most:
            raise Overloaded(
                f"at most {most} requests of one client wait; {waiting} do: retry after 1 s", cause="client"
            )

    def cancel(self, one: Generation) -> None:
        """Nobody waits for a request any more; no effect on one that is over."""
        with self._lock:
            if not one.over:
                self._news.cancelled.append(one)
                self._changed.notify()

    def drain(self) -> None:
        """Take no more requests."""
        with self._lock:
            self._open = False

    def close(self, failure: Callable[[], ServerError] | None = None) -> None:
        """End the device thread's loop; what is not answered gets an error."""
        with self._lock:
            self._open, self._closed = False, True
            self._failure = failure or self._failure
            for waits in (self._changed, self._idle, self._timer):
                waits.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every request has its end."""
        until_s = self._clock.now() + timeout_s
        with self._idle:
            while self._live and not self._closed:
                if self._clock.now() >= until_s:
                    return False
                self._clock.wait(self._idle, until_s)
        return True

    def refusal(self) -> ServerError:
        """What those get who come too late."""
        if self._failure is not None:
            return self._failure()
        return Closed("a server that drains takes no new request; send it to another replica")

    def cut(self) -> ServerError:
        """What those get whose text is not complete when the server ends."""
        if self._failure is not None:
            return self._failure()
        return Closed("the server ended before the text was complete: send it to another replica")

    # -- device thread ------------------------------------------------------------------------------

    def take(self, *, block: bool) -> News | None:
        """What came; waits for something if told to. None once closed."""
        with self._lock:
            self._stall.device_came_back(self._clock.now(), busy=not block)
            while block and not self._closed and not self._news:
                self._clock.wait(self._changed, math.inf)
            self._stall.device_took(self._clock.now())
            if self._closed:
                for one in self._news.added:
                    self._out.append((one, self.refusal()))
                self._news = News()
                return None
            news, self._news = self._news, News()
            self.load.waiting += len(news.added)
            if self._client_rows is not None:
                self.load.clients.update(one.client for one in news.added)
        return news

    def due(self, now_s: float) -> list[Generation]:
        """Sequences whose deadline has come."""
        with self._lock:
            return cast("list[Generation]", self._deadlines.due(now_s))

    def send(self, one: Generation, event: Event) -> None:
        """Put something for a caller into the outbox."""
        final = isinstance(event, ServerError) or event.finish_reason is not None
        if not one.streams and isinstance(event, Delta):
            one.banked.append(event)
            if not final:
                return
            event = join(one.banked)
        self._out.append((one, event))

    def flush(self, books: Books) -> None:
        """Deliver the outbox, and `show`."""
        with self._lock:
            out = [event for event in self._out if self._owed(*event)]
            self._out = []
        _deliver(out)
        self.show(books)
        with self._lock:
            if not self._live:
                self._idle.notify_all()

    def _owed(self, one: Generation, event: Event) -> bool:
        """Whether a sequence is still to be told anything; after its end it is not."""
        if one not in self._live:
            return False
        if isinstance(event, ServerError) or event.finish_reason is not None:
            self._live.discard(one)
        return True

    def show(self, books: Books) -> None:
        """Let callers see the load."""
        load = Load(len(books.waiting), len(books.running), books.cache.available)
        if self._client_rows is not None:
            load.clients.update(one.client for one in books.waiting)
        with self._lock:
            self.load = load

    # -- timer thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep time; without it `expire` must be called."""
        threading.Thread(target=self._keep_time, name="servax-generation-timer", daemon=True).start()

    def _keep_time(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now_s = self._clock.now()
                self._timer_until_s = min(self._deadlines.next_s(), now_s + self._stall.stall_s)
                if now_s < self._timer_until_s:
                    self._clock.wait(self._timer, self._timer_until_s)
            self.expire(self._clock.now())

    def expire(self, now_s: float) -> None:
        """Tell those whose deadline has come, and everybody if the device is found to hang."""
        with self._lock:
            ended: list[tuple[Generation, State, ServerError]] = [
                (cast(Generation, one), State.EXPIRED, late()) for one in self._deadlines.due(now_s)
            ]
            if self._stall.found(now_s):
                ended += [(one, State.FAILED, self._stall.error()) for one in self._live]
            told = [(one, error) for one, _, error in ended if self._owed(one, error)]
            self._news.ended += ended
            self._changed.notify()
            if not self._live:
                self._idle.notify_all()
        _deliver(told)


def late() -> DeadlineExceeded:
    """What those hear whose text was not complete in time."""
    return DeadlineExceeded("the text was not complete at the request's deadline: allow it more time")


def _deliver(out: Iterable[tuple[Generation, Event]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Event], None], Event]]] = {}
    for one, event in out:
        sink = one.sink
        if isinstance(sink, LoopSink):
            by_loop.setdefault(sink.loop, []).append((sink.put, event))
        else:
            sink.deliver(event)
    for loop, events in by_loop.items():
        _post(loop, events)


def _post(loop: asyncio.AbstractEventLoop, events: list[tuple[Callable[[Event], None], Event]]) -> None:
    def put_all() -> None:
        for put, event in events:
            put(event)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(put_all)
