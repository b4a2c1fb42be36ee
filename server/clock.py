"""Time as an argument: monotonic seconds from a clock that tests can hold in their hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never falls, whatever the wall clock does."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds shown now."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: on a negative step.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock never falls; got a step of {seconds} s: pass 0 or more")
        self._now_s += seconds
