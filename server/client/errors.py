"""Errors of the client: those of the server by their reason, and two for what no server said."""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ..errors import BadRequest, Overloaded, ServerError, Unavailable, UnknownPath


class Unreachable(Unavailable):
    """No answer came: the connection was refused, or broke."""

    reason = "unreachable"


class BadAnswer(ServerError):
    """What answered does not speak the protocol, or stopped in the middle of it."""

    reason = "bad_answer"


def _tree(root: type[ServerError]) -> Iterator[type[ServerError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_REASON = {one.reason: one for one in _tree(ServerError)}
# Of several with one status the most general; what a proxy says for a server is told apart.
_BY_STATUS: Mapping[int, type[ServerError]] = {
    one.http_status: one for one in reversed(list(_tree(ServerError)))
} | {404: UnknownPath, 502: Unreachable}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ServerError:
    """The error that an answer tells of: of the class with its reason, else with its status.

    Args:
        status: of the answer, 400 or more.
        headers: by lower-case name.
        body: an error as OpenAI or the Open Inference Protocol shape it, or anything else.
    """
    reason, message = _said(body)
    if not message:
        message = f"The server answered with status {status} and no reason that servax knows: {body[:200]!r}"
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(status) or (BadRequest if status < 500 else ServerError)
    error = kind(message)
    asked_s = retry_after_s(headers)
    if isinstance(error, Overloaded):
        error.retry_after_s = asked_s or 0.0
    elif isinstance(error, Unavailable):
        error.retry_after_s = asked_s
    error.request_id = headers.get("x-request-id")
    return error


def error_in(event: Mapping[str, Any]) -> ServerError:
    """The error that an event of a stream tells of."""
    return error_of(500, {}, json.dumps(event).encode())


def _said(body: bytes) -> tuple[str, str]:
    """Reason and message of an error's body; empty where there is none."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return "", ""
    error = tree.get("error") if isinstance(tree, dict) else None
    if isinstance(error, dict):
        return str(error.get("code") or ""), str(error.get("message") or "")
    return (str(tree.get("reason") or ""), error) if isinstance(error, str) else ("", "")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None if there is none that can be read.

    Source: RFC 9110, section 10.2.3.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            until = parsedate_to_datetime(text)
        except ValueError:
            return None
        until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
        seconds = (until - _date(headers)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _date(headers: Mapping[str, str]) -> datetime:
    # The server's own clock, where it tells: ours may be off by more than the wait.
    try:
        return parsedate_to_datetime(headers["date"]).astimezone(UTC)
    except (KeyError, ValueError):
        return datetime.now(UTC)
