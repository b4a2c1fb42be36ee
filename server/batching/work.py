"""What the dispatcher hands to the device thread."""

from dataclasses import dataclass
from typing import Protocol

from .batcher import Launch


@dataclass(frozen=True, slots=True)
class Work:
    """A launch and the index of the model it is for."""

    lane: int
    launch: Launch


class Job(Protocol):
    """Something for the device thread that is no request; it goes before them."""

    def fail(self, error: Exception) -> None:
        """It will not be run."""
        ...
