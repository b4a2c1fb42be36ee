"""When a device that fails is left alone, and when it is tried again. Pure; time is an argument.

The circuit breaker of Nygard, "Release It!" (2007): closed while runs work; open after some that failed in a
row, so that nobody waits for a device that is broken; half open while one trial run is out.
"""

import enum
import math

from ..errors import DeviceFailed
from .faults import FaultPolicy


class Circuit(enum.Enum):
    """Whether work flows."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts failures in a row.

    Attributes:
        circuit: its state.
        gone: whether so many trials failed that the device is not expected to come back.
        why: the last failure, in words.
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self._policy = policy
        self._failed = self._trials = 0
        self._until_s = math.inf
        self.circuit = Circuit.CLOSED
        self.gone = False
        self.why = ""

    @property
    def shut_out(self) -> bool:
        """Whether requests are to be refused."""
        return self.circuit is not Circuit.CLOSED

    @property
    def spotless(self) -> bool:
        """Whether a run that works changes nothing."""
        return not self._failed and self.circuit is Circuit.CLOSED

    def failed(self, now_s: float, why: str) -> bool:
        """A batch or a trial failed for no fault of its rows; whether the circuit opened by that."""
        self._failed += 1
        self.why = why
        if self.circuit is Circuit.HALF_OPEN:
            self._trials += 1
            self.gone = self._trials >= self._policy.gone_after
        elif self.circuit is Circuit.OPEN or self._failed < self._policy.open_after:
            return False
        opened = self.circuit is Circuit.CLOSED
        self.circuit = Circuit.OPEN
        wait_s = self._policy.backoff_s * 2.0 ** min(self._trials, 64)
        self._until_s = now_s + min(wait_s, self._policy.most_backoff_s)
        return opened

    def worked(self) -> bool:
        """A run came back with answers; whether the circuit closed by that."""
        closed = self.circuit is not Circuit.CLOSED
        self._failed = self._trials = 0
        self.circuit, self.gone, self.why = Circuit.CLOSED, False, ""
        self._until_s = math.inf
        return closed

    def try_now(self, now_s: float) -> bool:
        """Whether a trial is due; it is out from then on."""
        if self.circuit is Circuit.OPEN and now_s >= self._until_s:
            self.circuit = Circuit.HALF_OPEN
            return True
        return False

    def next_s(self) -> float:
        """When a trial is due; infinity if none is, or one is out."""
        return self._until_s if self.circuit is Circuit.OPEN else math.inf

    def error(self) -> DeviceFailed:
        """What those hear who come while it is open."""
        hope = "restart it" if self.gone else "use another replica, or retry once it recovers"
        return DeviceFailed(
            f"requests run while the device works; it failed with {self.why!r}: {hope}", lasting=self.gone
        )
