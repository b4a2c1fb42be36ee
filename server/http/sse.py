"""One HTTP call whose answer may be a stream of server-sent events.

The first event is awaited before the status is sent, so what is refused at the door is an ordinary error;
what fails later is an event of its own, since the status is gone by then. A client that leaves ends the
generator at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from ..errors import Overloaded, ServerError
from ..metrics import Metrics
from .wire import (
    Call,
    ClientGoneError,
    Header,
    Reply,
    error_headers,
    read_body,
    run_while_connected,
    send_reply,
)

_log = logging.getLogger("servax.http")
Events = AsyncGenerator[bytes, None]
StreamHandler = Callable[[Call], Coroutine[Any, Any, "Reply | Events"]]
_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """One event; `data` has no line break."""
    return b"data: " + data + b"\n\n"


class StreamRoute:
    """An ASGI application for one route; as `HotRoute`, but the handler may give events.

    Args:
        route: the route's label in the metrics.
        handler: makes the reply or the events of a call; raises `ServerError`.
        error_shape: the JSON body of an error, also of one in the middle of a stream.
        metrics: counts each call once, by what the client got.
        max_body_bytes: larger bodies get 413.
        retry_after_s: `Retry-After` of 503.
    """

    def __init__(
        self,
        route: str,
        handler: StreamHandler,
        error_shape: Callable[[Call, ServerError], bytes],
        *,
        metrics: Metrics,
        max_body_bytes: int,
        retry_after_s: float,
    ) -> None:
        self.route, self._handler, self._error_shape = route, handler, error_shape
        self._metrics, self._max_body_bytes, self._retry_after_s = metrics, max_body_bytes, retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        begin_s = time.perf_counter()
        headers = dict(scope["headers"])
        call = Call(headers, scope.get("path_params", {}))
        outcome, reason = "ok", ""
        try:
            call.body = await read_body(headers, receive, self._max_body_bytes)
            handled = cast("Coroutine[Any, Any, Reply]", self._handler(call))
            made: Reply | Events = await run_while_connected(handled, receive)
            if isinstance(made, Reply):
                await send_reply(send, made)
            else:
                failed = await self._stream(call, made, receive, send, begin_s)
                outcome, reason = ("error", failed.reason) if failed else (outcome, reason)
        except ClientGoneError:
            outcome = reason = "cancelled"
        except Exception as cause:
            fault = cause if isinstance(cause, ServerError) else _fault(self.route)
            outcome, reason = "error", fault.reason
            await send_reply(send, self._refusal(call, fault))
        self._metrics.reply(call.model, self.route, outcome, reason, time.perf_counter() - begin_s)

    def _refusal(self, call: Call, error: ServerError) -> Reply:
        if isinstance(error, Overloaded):
            self._metrics.shed(call.model, error.cause)
        headers = error_headers(error, self._retry_after_s)
        return Reply(self._error_shape(call, error), status=error.http_status, headers=headers)

    async def _stream(
        self, call: Call, events: Events, receive: Receive, send: Send, begin_s: float
    ) -> ServerError | None:
        """Sends events; the error that cut the stream short, if one did."""
        gone = asyncio.ensure_future(receive())
        begun = False
        try:
            while True:
                try:
                    data = await _next(events, gone)
                except ClientGoneError:
                    raise
                except Exception as cause:
                    if not begun:
                        raise
                    error = cause if isinstance(cause, ServerError) else _fault(self.route)
                    await _send(send, event(self._error_shape(call, error)))
                    await _send(send, b"", more=False)
                    return error
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    begun = True
                    self._metrics.first_event(call.model, self.route, time.perf_counter() - begin_s)
                if data is None:
                    await _send(send, b"", more=False)
                    return None
                await _send(send, data)
        finally:
            gone.cancel()
            await events.aclose()


def _fault(route: str) -> ServerError:
    _log.exception("a request to %s failed inside the server", route)
    return ServerError("The server must not fail on a request, but it did; its log has the cause; report it.")


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _next(events: Events, gone: "asyncio.Future[Any]") -> bytes | None:
    """The next event, or None at the end.

    Raises:
        ClientGoneError: the client left first; the generator was told.
    """
    task = asyncio.ensure_future(anext(events, None))
    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise ClientGoneError
    return task.result()
