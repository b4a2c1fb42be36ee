"""How a call ends that is not answered: a status, a message, and what to do next in its trailing metadata."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from ..errors import NotReady, Overloaded, ServerError, Unavailable
from ..http.gate import Gate, late
from ..seam import Engine

DOMAIN: Final = "servax"
# HTTP/2 trailers of a call have 8 KiB by default, and hold the message twice: percent-encoded (up to three
# bytes for one) and, in the details, in base64.
_MESSAGE_BYTES = 1000
_ID_BYTES = 256
# How long those who are refused unread are told the same numbers, and are not counted yet.
_SAME_S = 0.05

Refusal = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""What `abort` of gRPC takes: the status, the message, the trailing metadata."""


def refusal(error: ServerError, engine: Engine, retry_after_s: float, request_id: str = "") -> Refusal:
    """The error's status, its message, and its details.

    The details are a `google.rpc.Status` with ErrorInfo (reason, and progress while warming up), RequestInfo
    (the request's id) and RetryInfo; for clients without that, the trailing metadata have `servax-reason`
    and `grpc-retry-pushback-ms`, which gRPC's own retry policy obeys: -1, no retry at all, where what is
    wrong does not pass by itself (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
    """
    code = grpc.StatusCode[error.grpc_status]
    message = fitting(str(error))
    trailers: list[tuple[str, str | bytes]] = [("servax-reason", error.reason)]
    info = error_details_pb2.ErrorInfo(reason=error.reason.upper(), domain=DOMAIN)
    if isinstance(error, NotReady):
        status = engine.status()
        info.metadata.update({key: str(status[key]) for key in ("state", "done", "total") if key in status})
    details: list[Any] = [info]
    if request_id and len(request_id.encode()) <= _ID_BYTES:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    wait_s = _retry_s(error, retry_after_s)
    if wait_s is not None:
        milliseconds = math.ceil(wait_s * 1e3)
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(milliseconds)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append(("grpc-retry-pushback-ms", str(milliseconds)))
    elif isinstance(error, Unavailable):
        trailers.append(("grpc-retry-pushback-ms", "-1"))
    packed = [any_pb2.Any() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    rich = status_pb2.Status(code=code.value[0], message=message, details=packed)
    trailers.append(("grpc-status-details-bin", rich.SerializeToString()))
    return code, message, tuple(trailers)


def _retry_s(error: ServerError, retry_after_s: float) -> float | None:
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return retry_after_s if isinstance(error, Unavailable) and not error.lasting else None


def fitting(message: str) -> str:
    """The message, with its middle left out where it is longer than what HTTP/2 trailers may hold."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= _MESSAGE_BYTES:
        return encoded.decode("utf-8")
    rule, remedy = encoded[: 3 * _MESSAGE_BYTES // 4], encoded[-_MESSAGE_BYTES // 4 :]
    return f"{rule.decode('utf-8', 'ignore')} [...] {remedy.decode('utf-8', 'ignore')}"


async def end(context: Any, said: Refusal) -> None:
    """Ends a call, by raising what gRPC raises; returns where its caller has left meanwhile.

    gRPC would log each of those with its stack, which under load costs more than all else.
    """
    try:
        await context.abort(*said)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        return


class Unread:
    """Ends calls that the gate refuses; they are many, so what they hear is made once for some time.

    Args:
        gate: refused them.
        engine: as of `refusal`.
        clock: monotonic seconds.
    """

    def __init__(self, gate: Gate, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate, self._engine, self._clock = gate, engine, clock
        self._said: Refusal | None = None
        self._until_s = 0.0

    def note(self) -> None:
        """Counts a call that was not read, soon."""
        if self._gate.refused():
            asyncio.get_running_loop().call_later(_SAME_S, self._gate.flush)

    async def refuse(self, context: Any) -> None:
        """Ends a call, as `end` does."""
        self.note()
        now_s = self._clock()
        if self._said is None or now_s >= self._until_s:
            error = late(self._gate)
            self._said = refusal(error, self._engine, error.retry_after_s)
            self._until_s = now_s + _SAME_S
        await end(context, self._said)
