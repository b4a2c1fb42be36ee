"""Server-sent events out of bytes, cut anywhere.

Source: the event stream format of the HTML standard, section 9.2. Lines are split at line feeds alone: JSON
may hold U+2028 and its like, at which `str.splitlines` would split too.
"""

import json
from collections.abc import Mapping
from typing import Any

from .answers import Usage
from .errors import BadAnswer, error_in

MOST_BYTES = 16 << 20


class EventReader:
    """Takes bytes as they come and gives the data of each complete event."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in this chunk.

        Raises:
            BadAnswer: a line is longer than any event of ours.
        """
        self._buffer += chunk
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        if len(rest) > MOST_BYTES:
            raise BadAnswer(f"An event has at most {MOST_BYTES} bytes, got more; check what listens there.")
        found = []
        for line in lines:
            text = bytes(line).removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


class Deltas:
    """The text deltas in the events of a completion or of a chat, and what came with them.

    Attributes:
        done: whether the stream said that it is complete.
        text: all deltas so far.
        finish_reason: `stop` or `length`, once known.
        usage: once known.
    """

    def __init__(self) -> None:
        self._events = EventReader()
        self._parts: list[str] = []
        self.done = False
        self.finish_reason: str | None = None
        self.usage: Usage | None = None

    @property
    def text(self) -> str:
        """All deltas so far."""
        return "".join(self._parts)

    def feed(self, chunk: bytes) -> list[str]:
        """The deltas in this chunk.

        Raises:
            ServerError: the server failed in the middle of the stream.
            BadAnswer: it is no such stream.
        """
        found = []
        for data in self._events.feed(chunk):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                delta = self._take(json.loads(data))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise BadAnswer(
                    f"A stream holds completions in JSON, got {data[:200]!r}: {error!r}; check the URL."
                ) from None
            if delta:
                found.append(delta)
        self._parts += found
        return found

    def _take(self, event: Mapping[str, Any]) -> str:
        if "error" in event:
            raise error_in(event)
        if event.get("usage"):
            self.usage = Usage.of(event["usage"])
        if not event["choices"]:
            return ""
        choice = event["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text: str = (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        return text
