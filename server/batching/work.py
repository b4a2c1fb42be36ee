"""What the dispatcher hands to the device thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .batcher import Launch
from .request import Row


@dataclass(frozen=True, slots=True)
class Work:
    """A launch and the index of the model it is for."""

    lane: int
    launch: Launch

    @property
    def rows(self) -> Sequence[Row]:
        """What is launched."""
        return self.launch.rows


@dataclass(frozen=True, slots=True)
class Rerun:
    """Rows of a batch that failed on one device, to be run on another.

    Attributes:
        lane: index of their model.
        launch: as they ran.
        left: how many more devices may be tried after this one.
    """

    lane: int
    launch: Launch
    left: int

    @property
    def rows(self) -> Sequence[Row]:
        """What is launched."""
        return self.launch.rows

    def fail(self, error: Exception) -> None:
        """It will not be run: the server ends, which its callers are told by it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Find out whether a device that failed works again."""

    def fail(self, error: Exception) -> None:
        """It will not be run; nobody waits for it."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nothing waits or runs any more of a model that gave way: it can leave."""

    def fail(self, error: Exception) -> None:
        """It will not be run; who waits for the model is told by its `Retire`."""


class Job(Protocol):
    """Something for the device thread that is no request; it goes before them."""

    def fail(self, error: Exception) -> None:
        """It will not be run."""
        ...
