"""How final requests reach those who wait: threads and asyncio loops."""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from ..errors import Cancelled, ServerError
from .request import Request, Sink, State

_log = logging.getLogger(__name__)
_LET_GO = 0.1


def deliver(requests: Iterable[Request]) -> None:
    """Hand final requests to their sinks, one call for each sink; a failing sink hurts no other."""
    by_sink: dict[Sink, list[Request]] = {}
    for request in requests:
        by_sink.setdefault(request.sink, []).append(request)
    for sink, group in by_sink.items():
        try:
            sink.deliver(group)
        except Exception:  # whoever calls is a thread that must go on
            _log.exception("%d answers could not be handed over", len(group))


def outcome(request: Request) -> tuple[Any, ServerError | None]:
    """Result or error of a final request."""
    if request.state is State.DONE:
        return request.results, None
    return None, request.error or Cancelled("the request was cancelled before its answer was ready")


class ThreadSink:
    """Resolves a `concurrent.futures.Future` for callers in threads."""

    lag_s = 0.0

    def deliver(self, requests: Sequence[Request]) -> None:
        """Resolve the future of each request, unless its caller cancelled it."""
        for request in requests:
            future: Future[Any] = request.future
            if not future.set_running_or_notify_cancel():
                continue
            result, error = outcome(request)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class LoopSink:
    """Resolves asyncio futures, one wake-up of their loop for each batch.

    Attributes:
        lag_s: how long the loop took lately to get to what it was handed: the worst of late, let go slowly.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lag_s = 0.0
        # Weak, since this object is the value in a table whose key is the loop.
        self._loop = weakref.ref(loop)

    def deliver(self, requests: Sequence[Request]) -> None:
        """Resolve the futures in their loop; if it is closed nobody waits any more."""
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            # It may still close between the two lines.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._resolve, requests, time.perf_counter())

    def _resolve(self, requests: Sequence[Request], handed_s: float) -> None:
        lag_s = time.perf_counter() - handed_s
        self.lag_s = max(lag_s, self.lag_s + _LET_GO * (lag_s - self.lag_s))
        _resolve_all(requests)


def _resolve_all(requests: Sequence[Request]) -> None:
    for request in requests:
        future: asyncio.Future[Any] = request.future
        if future.done():
            continue
        result, error = outcome(request)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class Sinks:
    """One sink for all threads and one for each running asyncio loop."""

    def __init__(self) -> None:
        self.threads = ThreadSink()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopSink] = (
            weakref.WeakKeyDictionary()
        )

    def of_loop(self, loop: asyncio.AbstractEventLoop) -> LoopSink:
        """The sink of a loop; called in that loop."""
        sink = self._loops.get(loop)
        if sink is None:
            sink = self._loops[loop] = LoopSink(loop)
        return sink
