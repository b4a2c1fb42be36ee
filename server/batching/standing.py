"""What waits and runs in a dispatcher, and the sleep until nothing does."""

import threading

from .admission import Load, QueueLimits
from .failover import Failover

_LULL_S = 0.025


class Standing(Failover):
    """The part of a dispatcher that tells of its load; its lock guards all of it."""

    _idle_cond: threading.Condition

    def load(self, lane: int | None = None) -> tuple[Load, int]:
        """What waits and how many rows run, over all models; of a single one only its rows."""
        with self._lock:
            if lane is None:
                return self._ledger.load.copy(), sum(self._ledger.running)
            return Load(self._ledger.waiting[lane]), self._ledger.running[lane]

    @property
    def limits(self) -> QueueLimits:
        """Bounds on what may wait, over all models."""
        return self._ledger.limits

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return self._ledger.idle

    def wait_idle(self, timeout_s: float) -> bool:
        """Sleep until nothing waits and nothing runs, the timeout, or the close; whether it is idle."""
        with self._lock:
            until_s = self._clock.now() + timeout_s
            while not (self._ledger.idle or self._closed) and self._clock.now() < until_s:
                self._clock.wait(self._idle_cond, until_s)
            return self._ledger.idle

    def wait_lull(self) -> None:
        """Sleep until the last row lands, 25 ms at most: then work beside requests meets the fewest."""
        with self._lock:
            if not self._closed:
                self._idle_cond.wait(_LULL_S)  # real time: it is the host that is spared
