"""Stop strings, looked for across token borders: no part of one is ever sent."""

from collections.abc import Sequence


class StopScanner:
    """Passes text on until a stop string is complete.

    Text that may be the beginning of a stop string is held back, and passed on once it can no longer match.
    The string that is complete first wins, the longest of those that end at once; so the outcome does not
    depend on how the text was cut into tokens.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """More text; returns what can be sent."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text is over without a stop string: what was held."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
