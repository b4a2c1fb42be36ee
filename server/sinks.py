"""How final requests reach those who wait: threads and asyncio loops."""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from .errors import Cancelled, ServerError
from .request import Request, State


def outcome(request: Request) -> tuple[Any, ServerError | None]:
    """Result or error of a final request."""
    if request.state is State.DONE:
        return request.results, None
    return None, request.error or Cancelled("the request was cancelled before its answer was ready")


class ThreadSink:
    """Resolves a `concurrent.futures.Future` for callers in threads."""

    def deliver(self, requests: Sequence[Request]) -> None:
        """Resolve the future of each request."""
        for request in requests:
            future: Future[Any] = request.future
            result, error = outcome(request)
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class LoopSink:
    """Resolves asyncio futures, one wake-up of their loop for each batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, requests: Sequence[Request]) -> None:
        """Resolve the futures in their loop; if it is closed nobody waits any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve_all, requests)


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
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopSink] = WeakKeyDictionary()

    def of_loop(self, loop: asyncio.AbstractEventLoop) -> LoopSink:
        """The sink of a loop; called in that loop."""
        sink = self._loops.get(loop)
        if sink is None:
            sink = self._loops[loop] = LoopSink(loop)
        return sink
