"""Time as an argument: monotonic seconds from a clock that tests can hold in their hand.

A thread that sleeps until some time asks the clock to wait, so that a test with a manual clock needs no
sleeping either.
"""

import math
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never falls, whatever the wall clock does."""
        ...

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        """Sleep until the condition is notified or the clock shows a time; may wake earlier.

        Args:
            condition: held by the calling thread, as for `threading.Condition.wait`.
            until_s: on this clock; infinity to wait for a notification only.
        """
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        """Sleep until the condition is notified or the clock shows `until_s`."""
        if until_s == math.inf:
            condition.wait()
        elif (left_s := until_s - time.monotonic()) > 0:
            condition.wait(min(left_s, threading.TIMEOUT_MAX))


class ManualClock:
    """A clock that moves only when told; for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self._sleepers: list[threading.Condition] = []

    def now(self) -> float:
        """Seconds shown now."""
        return self._now_s

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        """Sleep until the condition is notified or the clock is advanced."""
        with self._lock:
            if until_s <= self._now_s:
                return
            self._sleepers.append(condition)
        try:
            condition.wait()
        finally:
            with self._lock:
                self._sleepers.remove(condition)

    def advance(self, seconds: float) -> None:
        """Move forward and wake every thread that waits on this clock.

        Raises:
            ValueError: on a negative step.
        """
        if not seconds >= 0:
            raise ValueError(f"a monotonic clock never falls; got a step of {seconds} s: pass 0 or more")
        with self._lock:
            self._now_s += seconds
            sleepers = list(self._sleepers)
        for condition in sleepers:
            # A sleeper holds its condition from before it is listed until it sleeps, so none is missed.
            with condition:
                condition.notify_all()
