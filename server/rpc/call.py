"""One gRPC call: parse, run within its deadline, answer once, count once, refuse with a reason in detail."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from ..context import CALL, TRACE, CallContext, parse_traceparent
from ..errors import Cancelled, DeadlineExceeded, NotReady, Overloaded, ServerError, Unavailable
from ..http.entry import Keys
from ..http.gate import Gate, late
from ..metrics import Metrics
from ..seam import Engine

ROUTE = "grpc"
DOMAIN = "servax"
# HTTP/2 trailers of a call have 8 KiB by default, and hold the message twice: percent-encoded (up to three
# bytes for one) and, in the details, in base64.
_MESSAGE_BYTES = 1000
_ID_BYTES = 256
# What is left of a deadline when the client's own timer has fired first: its reset travels for some time,
# and the deadline on the wire is rounded up, by about 1 % at most.
_LATE_S, _LATE_SHARE = 0.01, 0.02
_log = logging.getLogger("servax.grpc")
_access = logging.getLogger("servax.access")


@dataclass(slots=True)
class GrpcCall:
    """What became known of one call so far; an error reply names it.

    Attributes:
        context: gRPC's own object of the call.
        model: name of the served model, once it is found; a label of the metrics.
        request_id: the id in the request, "" where there is none.
        allowed_s: seconds that the client's deadline left at the start; None without a deadline.
    """

    context: Any
    model: str = ""
    request_id: str = ""
    allowed_s: float | None = None

    def timeout_s(self, timeout_us: int) -> float | None:
        """The smallest of the request's own timeout (0 is not set) and what is left of the deadline.

        Raises:
            DeadlineExceeded: nothing is left.
        """
        left_s: float | None = self.context.time_remaining()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"A request needs time left when its input is read, got {self.allowed_s:.3f} s in all; "
                "allow more time."
            )
        if not timeout_us:
            return left_s
        return timeout_us / 1e6 if left_s is None else min(left_s, timeout_us / 1e6)

    def expired(self) -> bool:
        """Whether the client saw its deadline pass, rather than cancelled."""
        left_s: float | None = self.context.time_remaining()
        return left_s is not None and left_s <= max(_LATE_S, _LATE_SHARE * (self.allowed_s or 0.0))


Handler = Callable[[bytes, GrpcCall], Awaitable[bytes]]


class Method:
    """A unary method over bytes.

    Args:
        handler: makes the encoded answer; raises `ServerError`.
        engine: tells where warm-up stands.
        retry_after_s: advice that goes with UNAVAILABLE.
        metrics: counts each call once, by what the client got; None counts nothing.
        keys: who may call; None for a probe, which everybody may.
        gate: refuses unread what the event loop cannot begin in time; None lets all in.
    """

    def __init__(
        self,
        handler: Handler,
        engine: Engine,
        retry_after_s: float,
        metrics: Metrics | None = None,
        *,
        keys: Keys | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._turns = None if gate is None else Turns(gate)
        self._handler = handler
        self._engine = engine
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, raw: bytes, context: Any) -> bytes:
        """Answers one call."""
        start_s = time.perf_counter()
        call = GrpcCall(context, allowed_s=context.time_remaining())
        if self._turns is not None and not self._turns.enter():
            await self._turns.refuse(call, self._engine)
        try:
            self._enter(context)
            answer = await self._handler(raw, call)
        except asyncio.CancelledError:
            late = call.expired()
            self._learn(call, refused=late)
            error_type = DeadlineExceeded if late else Cancelled
            self._count(call, "error" if late else "cancelled", error_type.reason, start_s)
            raise
        except Exception as cause:
            error = cause if isinstance(cause, ServerError) else _log_fault()
        else:
            self._learn(call)
            self._count(call, "ok", "", start_s)
            return answer
        self._learn(call, refused=isinstance(error, Overloaded | DeadlineExceeded))
        self._count(call, "error", error.reason, start_s)
        if self._metrics is not None and isinstance(error, Overloaded):
            self._metrics.shed(call.model, error.cause)
        await refuse(call, error, self._engine, self._retry_after_s)
        raise error  # never reached: refusing ends the call

    def _learn(self, call: GrpcCall, *, refused: bool = False) -> None:
        if self._turns is not None:
            self._turns.gate.allowed(call.allowed_s, refused=refused)

    def _enter(self, context: Any) -> None:
        """Check the key, and keep who calls under which ids; a call has a context of its own."""
        given = dict(context.invocation_metadata() or ())
        key = given.get("authorization", given.get("x-api-key"))
        client = "" if self._keys is None else self._keys.check(None if key is None else str(key).encode())
        trace = TRACE.get() or parse_traceparent(str(given.get("traceparent", "")))
        # Without the port: a client's connections share one allowance.
        CALL.set(
            CallContext(str(given.get("x-request-id", "")), client or context.peer().rsplit(":", 1)[0], trace)
        )

    def _count(self, call: GrpcCall, outcome: str, reason: str, start_s: float) -> None:
        seconds = time.perf_counter() - start_s
        if self._metrics is not None:
            self._metrics.reply(call.model, ROUTE, outcome, reason, seconds)
            if _access.isEnabledFor(logging.INFO):
                extra = {"model": call.model, "reason": reason, "seconds": round(seconds, 6)}
                _access.info("grpc ModelInfer %s", outcome, extra=extra)


class Turns:
    """The gate of a transport that does not tell when it has read a request.

    What begins in one turn of the event loop was read before it, so the last of them waited for the others.

    Args:
        gate: decides.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._begun = 0
        self._begin_s = 0.0

    def enter(self) -> bool:
        """Whether a call may begin."""
        now_s = time.monotonic()
        if self.gate.enter(now_s) is None:
            return False
        if not self._begun:
            self._begin_s = now_s
            asyncio.get_running_loop().call_soon(self._end)
        self._begun += 1
        return True

    def _end(self) -> None:
        count, self._begun = self._begun, 0
        lag_s = time.monotonic() - self._begin_s
        for _ in range(count):
            self.gate.begun(count - 1, lag_s, lag_s * (count - 1) / count)

    async def refuse(self, call: GrpcCall, engine: Engine) -> None:
        """Ends a call that may not begin; never returns."""
        if self.gate.refused():
            asyncio.get_running_loop().call_soon(self.gate.flush)
        error = late(self.gate)
        await refuse(call, error, engine, error.retry_after_s)


def _log_fault() -> ServerError:
    _log.exception("a gRPC request failed inside the server")
    return ServerError("The server must not fail on a request, but it did; its log has the cause; report it.")


async def refuse(call: GrpcCall, error: ServerError, engine: Engine, retry_after_s: float) -> None:
    """Ends a call with the error's status, its message, and its details.

    The details are a `google.rpc.Status` with ErrorInfo (reason, and progress while warming up), RequestInfo
    (the request's id) and RetryInfo; for clients without that, the trailing metadata have `servax-reason`
    and `grpc-retry-pushback-ms`, which gRPC's own retry policy obeys.
    """
    code = grpc.StatusCode[error.grpc_status]
    message = fitting(str(error))
    trailers: list[tuple[str, str | bytes]] = [("servax-reason", error.reason)]
    info = error_details_pb2.ErrorInfo(reason=error.reason.upper(), domain=DOMAIN)
    if isinstance(error, NotReady):
        status = engine.status()
        info.metadata.update({key: str(status[key]) for key in ("state", "done", "total") if key in status})
    details: list[Any] = [info]
    if call.request_id and len(call.request_id.encode()) <= _ID_BYTES:
        details.append(error_details_pb2.RequestInfo(request_id=call.request_id))
    wait_s = _retry_s(error, retry_after_s)
    if wait_s is not None:
        milliseconds = math.ceil(wait_s * 1e3)
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(milliseconds)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append(("grpc-retry-pushback-ms", str(milliseconds)))
    packed = [any_pb2.Any() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    rich = status_pb2.Status(code=code.value[0], message=message, details=packed)
    trailers.append(("grpc-status-details-bin", rich.SerializeToString()))
    await call.context.abort(code, message, tuple(trailers))


def _retry_s(error: ServerError, retry_after_s: float) -> float | None:
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return retry_after_s if isinstance(error, Unavailable) else None


def fitting(message: str) -> str:
    """The message, with its middle left out where it is longer than what HTTP/2 trailers may hold."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= _MESSAGE_BYTES:
        return encoded.decode("utf-8")
    rule, remedy = encoded[: 3 * _MESSAGE_BYTES // 4], encoded[-_MESSAGE_BYTES // 4 :]
    return f"{rule.decode('utf-8', 'ignore')} [...] {remedy.decode('utf-8', 'ignore')}"
