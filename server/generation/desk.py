"""The desk between callers and the device thread: requests and cancellations in, deltas out.

Callers post under one lock and never touch a sequence again; the device thread takes all that came at once,
at the beginning of a step, and hands deltas out at its end, with one wake-up for each event loop.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from ..batching.clock import Clock
from ..batching.deadlines import Deadlines
from ..errors import Closed, Overloaded, ServerError
from .books import Books
from .output import Delta, join
from .sequence import Generation

Event = Delta | ServerError


@dataclass(slots=True)
class News:
    """What came since it was last asked for."""

    added: list[Generation] = field(default_factory=list)
    cancelled: list[Generation] = field(default_factory=list)


@dataclass(slots=True)
class Load:
    """Sequences that wait and that run, and pages that can be taken, after the last step."""

    waiting: int = 0
    running: int = 0
    free_pages: int = 0


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
    """

    def __init__(self, clock: Clock, max_waiting: int) -> None:
        self._clock, self._max_waiting = clock, max_waiting
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._news = News()
        self._deadlines = Deadlines()
        self._out: list[tuple[Generation, Event]] = []
        self._open, self._closed = True, False
        self._live = 0
        self._failure: Callable[[], ServerError] | None = None
        self.load = Load()

    # -- callers ------------------------------------------------------------------------------------

    def post(self, one: Generation) -> None:
        """Queue a request.

        Raises:
            Overloaded: too many wait.
            Closed: the server is draining or closed.
        """
        with self._lock:
            if not self._open:
                raise self.refusal()
            waiting = self.load.waiting + len(self._news.added)
            if waiting >= self._max_waiting:
                raise Overloaded(
                    f"at most {self._max_waiting} requests wait; {waiting} do: retry after 1 s", cause="rows"
                )
            self._news.added.append(one)
            self._live += 1
            self._changed.notify()

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
            self._changed.notify_all()
            self._idle.notify_all()

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

    # -- device thread ------------------------------------------------------------------------------

    def take(self, *, block: bool) -> News | None:
        """What came; waits for something if told to. None once closed."""
        with self._lock:
            while block and not self._closed and not self._news.added and not self._news.cancelled:
                self._clock.wait(self._changed, math.inf)
            if self._closed:
                for one in self._news.added:
                    self._out.append((one, self.refusal()))
                self._news = News()
                return None
            news, self._news = self._news, News()
            self.load.waiting += len(news.added)
        for one in news.added:
            self._deadlines.add(cast(Any, one))
        return news

    def due(self, now_s: float) -> list[Generation]:
        """Sequences whose deadline has come."""
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
        out, self._out = self._out, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Event], None], Event]]] = {}
        ended = 0
        for one, event in out:
            ended += isinstance(event, ServerError) or event.finish_reason is not None
            sink = one.sink
            if isinstance(sink, LoopSink):
                by_loop.setdefault(sink.loop, []).append((sink.put, event))
            else:
                sink.deliver(event)
        for loop, events in by_loop.items():
            _post(loop, events)
        self.show(books)
        with self._lock:
            self._live -= ended
            if not self._live:
                self._idle.notify_all()

    def show(self, books: Books) -> None:
        """Let callers see the load."""
        load = Load(len(books.waiting), len(books.running), books.cache.available)
        with self._lock:
            self.load = load


def _post(loop: asyncio.AbstractEventLoop, events: list[tuple[Callable[[Event], None], Event]]) -> None:
    def put_all() -> None:
        for put, event in events:
            put(event)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(put_all)
