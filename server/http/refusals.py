"""What those hear whom the gate refuses: whole answers, written without the application."""

import math
import random
from collections.abc import Sequence
from typing import Any

from .gate import Gate, late
from .wire import Call, ErrorShape

_ids = random.Random()


class Refusals:
    """Answers with 429, in the shape of the protocol that a path belongs to.

    Args:
        gate: decides whom to refuse.
        kserve_shape, openai_shape: bodies of errors under `/v2`, and elsewhere.
    """

    def __init__(self, gate: Gate, kserve_shape: ErrorShape, openai_shape: ErrorShape) -> None:
        self.gate = gate
        self._shapes = kserve_shape, openai_shape
        self._ready: dict[bool, bytes] = {}

    def flush(self) -> None:
        """Counts those that were refused since, and forgets their answers; once a turn of the loop."""
        self._ready.clear()
        self.gate.flush()

    def answer(
        self,
        url: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        more: Sequence[tuple[bytes, bytes]],
        *,
        keep: bool,
    ) -> tuple[bytes, ...]:
        """The parts of an answer.

        Args:
            url: the request's target.
            headers: of the request, names in lower case.
            more: headers that every answer has.
            keep: whether the connection is kept open.
        """
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        usable = 0 < len(given) <= 128 and all(0x21 <= byte <= 0x7E for byte in given)
        lines = [b"%b: %b\r\n" % one for one in more]
        if not keep:
            lines.append(b"connection: close\r\n")
        lines.append(b"x-request-id: %b\r\n" % (given if usable else b"%032x" % _ids.getrandbits(128)))
        openai = not url.startswith(b"/v2")
        rest = self._ready.get(openai) or self._ready.setdefault(openai, self._rest(openai))
        return (b"HTTP/1.1 429 Too Many Requests\r\n", *lines, rest)

    def _rest(self, openai: bool) -> bytes:
        error = late(self.gate)
        body = self._shapes[openai](Call({}, {}), error)
        head = b"content-type: application/json\r\nretry-after: %d\r\ncontent-length: %d\r\n\r\n"
        return head % (math.ceil(error.retry_after_s), len(body)) + body


def refusals_of(app: Any) -> Refusals | None:
    """What `create_app` left with its application; None for another application."""
    found = getattr(getattr(app, "state", None), "servax_refusals", None)
    return found if isinstance(found, Refusals) else None
