"""Whether a model's code stays what its key says while it is traced.

A key is made of what a function is at the start. Globals and closed-over values that change before or during
a trace make another program of it, which must not be kept under that key.
"""

from collections.abc import Callable
from typing import TypeVar

from .store import Fingerprinter

Made = TypeVar("Made")


class Watched:
    """Looks at the code right before and right after it is traced.

    What changes after the first look and changes back before the second is not seen.

    Args:
        maker: made the key.
        code: gives what it was made of.

    Attributes:
        changed: whether it was something else at some look.
    """

    def __init__(self, maker: Fingerprinter, code: Callable[[], object]) -> None:
        self._maker, self._code = maker, code
        self.changed = False

    def during(self, make: Callable[[], Made]) -> Made:
        """Have something made of it."""
        self._look()
        made = make()
        self._look()
        return made

    def _look(self) -> None:
        self.changed = self.changed or not self._maker.is_of(self._code())

    def why(self) -> str:
        """Why the program may not be kept; empty if it may."""
        return "what its code reads changed since its key was made" if self.changed else ""
