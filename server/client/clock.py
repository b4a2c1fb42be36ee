"""Time for the client: monotonic seconds and sleeping, which tests hold in their hand."""

import time
from typing import Protocol

import anyio


class Clock(Protocol):
    """Source of monotonic seconds, and of sleep."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait, in a thread."""
        ...

    async def asleep(self, seconds: float) -> None:
        """Wait, in a task."""
        ...


class SystemClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, in a thread."""
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        """Wait, in a task."""
        await anyio.sleep(seconds)


class ManualClock:
    """A clock that moves only by being slept on, or told; for tests.

    Attributes:
        slept: seconds of each sleep, in order.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self.slept: list[float] = []

    def now(self) -> float:
        """Seconds shown now."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move forward at once."""
        self.slept.append(seconds)
        self._now_s += seconds

    async def asleep(self, seconds: float) -> None:
        """Move forward at once."""
        self.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Move forward without a sleep."""
        self._now_s += seconds
