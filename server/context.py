"""Who asks, and under which ids: what a transport knows of a call and the core and the logs may want to know.

Carried by a context variable, so that tasks inherit it and the seam stays as small as it is.
"""

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a call belongs, after the W3C's Trace Context.

    Attributes:
        trace_id: of the whole trace, 32 hexadecimal digits.
        parent_id: the caller's span, 16 digits; "" if this call begins the trace.
        span_id: of this call.
    """

    trace_id: str
    parent_id: str
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class CallContext:
    """One call as its transport knows it.

    Attributes:
        request_id: given by the caller or made here.
        client: whose share of the queue it uses: a key, a header's value or an address.
        trace: None where the caller sent no trace.
    """

    request_id: str = ""
    client: str = ""
    trace: Trace | None = None


# Set by who traces calls, around all else; then it is the trace of the call, whatever its headers say.
TRACE: ContextVar[Trace | None] = ContextVar("servax_trace", default=None)
CALL: ContextVar[CallContext | None] = ContextVar("servax_call", default=None)


def client_of_call() -> str:
    """The client of the call in hand; "" outside of one."""
    call = CALL.get()
    return "" if call is None else call.client


def parse_traceparent(text: str) -> Trace | None:
    """The trace that a `traceparent` header names; None if it is malformed, as the standard wants.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
    """
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, parent_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return Trace(trace_id, parent_id)
