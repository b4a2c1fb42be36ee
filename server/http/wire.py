"""One HTTP call on a hot route: read the body within a limit, run, watch the client, answer once, count once.

The routes are bare ASGI applications: bodies are bytes in and bytes out, with no per-request model
validation by the framework.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ..errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unauthorized,
    Unavailable,
)
from ..metrics import Metrics
from .gate import CAME, Gate

Header = tuple[bytes, bytes]
# A client that leaves sooner is noticed then; what it asked for is either answered or freed by that time.
WATCH_AFTER_S = 0.02
_log = logging.getLogger("servax.http")


class ClientGoneError(Exception):
    """The client disconnected; there is nobody to answer."""


@dataclass(slots=True)
class Call:
    """One request, and what became known of it so far; an error reply names those facts.

    Attributes:
        headers: lower-case name to value, as they came.
        path: parameters of the path.
        body: the whole body.
        model: name of the served model, once it is found; a label of the metrics.
        param: the field that is being looked at, for the error body.
        request_id: the id in the request's body, for protocols that have one.
        came_s: when its head was read, monotonic seconds: the caller's time runs from then.
        allowed_s: seconds that the caller allows for the answer; None for no bound.
    """

    headers: dict[bytes, bytes]
    path: dict[str, str]
    body: bytes = b""
    model: str = ""
    param: str | None = None
    request_id: str | None = None
    came_s: float = field(default_factory=time.monotonic)
    allowed_s: float | None = None

    def left_s(self, allowed_s: float | None) -> float | None:
        """What is left of so many seconds from the arrival; 0 and None are no bound.

        Raises:
            DeadlineExceeded: nothing is left.
        """
        if not allowed_s:
            return None
        self.allowed_s = allowed_s
        left_s = self.came_s + allowed_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(
                f"A request needs time left once it is read, got {allowed_s:.3g} s from its arrival; "
                "allow more."
            )
        return left_s


@dataclass(slots=True)
class Reply:
    """One answer, ready to be sent."""

    body: bytes
    media_type: bytes = b"application/json"
    status: int = 200
    headers: list[Header] = field(default_factory=list)


Handler = Callable[[Call], Coroutine[Any, Any, Reply]]
ErrorShape = Callable[[Call, ServerError], bytes]


# Of a size in a header: Python refuses to read a number of thousands of digits.
MOST_DIGITS = 18


class HotRoute:
    """An ASGI application for one route.

    Args:
        route: the route's label in the metrics.
        handler: makes the reply of a call; raises `ServerError`.
        error_shape: the JSON body of an error.
        metrics: counts each call once, by what the client got.
        max_body_bytes: larger bodies get 413.
        retry_after_s: `Retry-After` of 503.
        gate: told what callers allow.
    """

    def __init__(
        self,
        route: str,
        handler: Handler,
        error_shape: ErrorShape,
        *,
        metrics: Metrics,
        max_body_bytes: int,
        retry_after_s: float,
        gate: Gate | None = None,
    ) -> None:
        self.route = route
        self._gate = gate
        self._handler = handler
        self._error_shape = error_shape
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        start_s = time.perf_counter()
        headers = dict(scope["headers"])
        call = Call(headers, scope.get("path_params", {}))
        if (came := scope.get(CAME)) is not None:
            call.came_s = came[0]
        outcome, reason, error = "ok", "", None
        try:
            call.body = await read_body(headers, receive, self._max_body_bytes)
            reply = await run_while_connected(self._handler(call), receive)
        except ClientGoneError:
            self._count(call, "cancelled", "cancelled", start_s)
            return
        except Exception as cause:
            error = cause if isinstance(cause, ServerError) else self._log_fault()
            outcome, reason = "error", error.reason
            if isinstance(error, Overloaded):
                self._metrics.shed(call.model, error.cause)
            headers_out = error_headers(error, self._retry_after_s)
            reply = Reply(self._error_shape(call, error), status=error.http_status, headers=headers_out)
        if self._gate is not None:
            self._gate.allowed(call.allowed_s, refused=isinstance(error, Overloaded | DeadlineExceeded))
        self._count(call, outcome, reason, start_s)
        await send_reply(send, reply)

    def _count(self, call: Call, outcome: str, reason: str, start_s: float) -> None:
        self._metrics.reply(call.model, self.route, outcome, reason, time.perf_counter() - start_s)

    def _log_fault(self) -> ServerError:
        _log.exception("a request to %s failed inside the server", self.route)
        return ServerError(
            "The server must not fail on a request, but it did; its log has the cause; report it."
        )


def error_headers(error: ServerError, retry_after_s: float) -> list[Header]:
    """`Retry-After` for what a retry can cure, `Connection: close` where the connection is of no more use."""
    headers: list[Header] = []
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    if isinstance(error, Unavailable) and not error.lasting:
        headers.append((b"retry-after", b"%d" % math.ceil(retry_after_s)))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Closed | PayloadTooLarge):
        headers.append((b"connection", b"close"))
    return headers


async def send_reply(send: Send, reply: Reply) -> None:
    """Writes a reply in one piece."""
    headers = [
        (b"content-type", reply.media_type),
        (b"content-length", b"%d" % len(reply.body)),
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def read_body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """Reads the request's body.

    Raises:
        BadRequest: the body is compressed.
        PayloadTooLarge: the body has more than `limit` bytes, by its header or as it arrives.
        ClientGoneError: the client left before its end.
    """
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.strip().lower() not in (b"identity", b""):
        raise BadRequest(
            f"A request body must not be compressed, got Content-Encoding {encoding.decode('latin-1')!r}; "
            "send it plain."
        )
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and (len(declared) > MOST_DIGITS or int(declared) > limit):
        said = declared[:40].decode("latin-1")
        raise PayloadTooLarge(f"A request body has at most {limit} bytes, got {said}; split the request.")
    message = await receive()
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise PayloadTooLarge(f"A request body has at most {limit} bytes, got more; split the request.")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        message = await receive()


async def run_while_connected(work: Coroutine[Any, Any, Reply], receive: Receive) -> Reply:
    """Runs `work`, and cancels it when the client disconnects, so that its place is free.

    Work that ends within `WATCH_AFTER_S` is not watched: it runs in the caller's task, and listening to the
    client would cost as much as all else here (26 of 74 microseconds a request).

    Raises:
        ClientGoneError: the client disconnected first.
    """
    watch = _Watch(receive)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone and watch.task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch.end()


class _Watch:
    """Listens to the client from `WATCH_AFTER_S` on, and cancels the task it was made in once it has left."""

    __slots__ = ("_listener", "_receive", "_timer", "gone", "task")

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A request must be answered in a task of asyncio, got none; run it in one.")
        self.task, self.gone = task, False
        self._receive = receive
        self._listener: asyncio.Future[Message] | None = None
        self._timer = task.get_loop().call_later(WATCH_AFTER_S, self._listen)

    def _listen(self) -> None:
        # The body has been read: whatever the client says now is its end.
        self._listener = asyncio.ensure_future(_next(self._receive))
        self._listener.add_done_callback(self._heard)

    def _heard(self, listener: "asyncio.Future[Message]") -> None:
        if not listener.cancelled():
            listener.exception()  # looked at, or asyncio would complain; the end of the client all the same
            self.gone = True
            self.task.cancel()

    def end(self) -> None:
        """Stops listening."""
        self._timer.cancel()
        if self._listener is not None:
            self._listener.remove_done_callback(self._heard)
            self._listener.cancel()


async def _next(receive: Receive) -> Message:
    return await receive()
