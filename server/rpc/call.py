"""One gRPC call: parse, run within its deadline, answer once, count once, refuse with a reason in detail."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ..context import CALL, TRACE, CallContext, parse_traceparent
from ..errors import BadRequest, Cancelled, DeadlineExceeded, Overloaded, ServerError
from ..http.entry import Keys
from ..metrics import Metrics
from ..seam import Engine
from .lag import LagGate
from .line import Line
from .refusing import Unread, end, refusal

ROUTE = "grpc"
# What is left of a deadline when the client's own timer has fired first: its reset travels for some time,
# and the deadline on the wire is rounded up, by about 1 % at most.
_LATE_S, _LATE_SHARE = 0.01, 0.02
# Within which gRPC cancels the task of a call that has ended, after it told that no message will come.
_CANCEL_S = 0.05
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
    """

    def __init__(
        self,
        handler: Handler,
        engine: Engine,
        retry_after_s: float,
        metrics: Metrics | None = None,
        *,
        keys: Keys | None = None,
    ) -> None:
        self._handler = handler
        self._engine = engine
        self._retry_after_s = retry_after_s
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, raw: bytes, context: Any) -> bytes:
        """Answers one call."""

        async def given() -> bytes:
            return raw

        return await self._answer(GrpcCall(context, allowed_s=context.time_remaining()), given)

    async def _answer(self, call: GrpcCall, read: Callable[[], Awaitable[bytes]]) -> bytes:
        start_s = time.perf_counter()
        try:
            raw = await read()
            self._enter(call.context)
            answer = await self._handler(raw, call)
        except asyncio.CancelledError:
            expired = call.expired()
            self._learn(call, refused=expired)
            error_type = DeadlineExceeded if expired else Cancelled
            self._count(call, "error" if expired else "cancelled", error_type.reason, start_s)
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
        await end(call.context, refusal(error, self._engine, self._retry_after_s, call.request_id))
        return b""  # its caller has left

    def _learn(self, call: GrpcCall, *, refused: bool = False) -> None:
        """What became known of a call."""

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


class Gated(Method):
    """Such a method behind a gate, which refuses unread what cannot begin in time.

    To gRPC it takes a stream of requests, else gRPC would read the only one before it calls; on the wire and
    for clients there is no difference.

    Args:
        gate: decides.
        handler, engine, retry_after_s, metrics, keys: as of `Method`.
    """

    def __init__(
        self,
        gate: LagGate,
        handler: Handler,
        engine: Engine,
        retry_after_s: float,
        metrics: Metrics | None = None,
        *,
        keys: Keys | None = None,
    ) -> None:
        super().__init__(handler, engine, retry_after_s, metrics, keys=keys)
        self._line = Line(gate)
        self._unread = Unread(gate, engine)

    async def __call__(self, requests: Any, context: Any) -> bytes:
        """Answers one call, or refuses it."""
        left_s = context.time_remaining()
        if left_s == 0.0:  # it waited elsewhere until its caller left, so it needs no answer
            self._unread.note()
            raise asyncio.CancelledError
        place = self._line.enter()
        if place is None:
            await self._unread.refuse(context)
            return b""  # its caller has left
        call = GrpcCall(context, allowed_s=None if left_s is None else left_s + self._line.gate.lag.seconds)

        async def read() -> bytes:
            await self._line.turn(place)
            raw = await context.read()
            if raw is grpc.aio.EOF:
                # Cancelled as it began, or refused by gRPC itself, which is about to cancel this task.
                await asyncio.sleep(_CANCEL_S)
                raise BadRequest("A call of ModelInfer brings one message, got none; send a request.")
            return bytes(raw)

        return await self._answer(call, read)

    def _learn(self, call: GrpcCall, *, refused: bool = False) -> None:
        self._line.gate.allowed(call.allowed_s, refused=refused)


def _log_fault() -> ServerError:
    _log.exception("a gRPC request failed inside the server")
    return ServerError("The server must not fail on a request, but it did; its log has the cause; report it.")
