"""The last two minutes by the second, and totals by bucket: what the live page shows. Time is an argument."""

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SECONDS = 120
# Latencies in steps of a tenth of a power of two: percentiles are right within 7 %.
_FIRST_S, _STEP = 1e-4, 0.1
_STEPS = 220


@dataclass(slots=True)
class BucketTotals:
    """What a bucket did since the start.

    Attributes:
        runs: batches.
        rows: real rows in them.
        real: real elements.
        computed: elements computed, padding included.
        device_s: seconds on the device.
        wasted_s: seconds that padding took at most: its share of the places, which kernels may leave out.
        cold: batches that ran here since a better bucket was not warm.
        left: batches by the reason for which they left the queue.
    """

    runs: int = 0
    rows: int = 0
    real: int = 0
    computed: int = 0
    device_s: float = 0.0
    wasted_s: float = 0.0
    cold: int = 0
    left: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Second:
    at: int
    replies: int = 0
    errors: int = 0
    rows: int = 0
    waiting: int = 0
    device_s: float = 0.0
    steps: dict[int, int] = field(default_factory=dict)

    def percentile_s(self, share: float) -> float | None:
        """The latency that a share of the replies kept, at the upper edge of its step."""
        total, seen = sum(self.steps.values()), 0
        for step in sorted(self.steps):
            seen += self.steps[step]
            if seen >= share * total:
                return float(_FIRST_S * 2 ** ((step + 1) * _STEP))
        return None


class Recent:
    """Counts for people; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._buckets: dict[tuple[str, str], BucketTotals] = {}

    def reply(self, now_s: float, seconds: float, *, good: bool, count: int = 1) -> None:
        """An answer, or so many alike, went out after so many seconds."""
        ratio = max(seconds, _FIRST_S) / _FIRST_S
        step = min(int(math.log2(ratio) / _STEP), _STEPS)
        with self._lock:
            second = self._at(now_s)
            second.replies += count
            second.errors += 0 if good else count
            second.steps[step] = second.steps.get(step, 0) + count

    def batch(
        self,
        now_s: float,
        model: str,
        bucket: str,
        *,
        rows: int,
        real: int,
        computed: int,
        seconds: float,
        cold: bool = False,
        reason: str = "step",
    ) -> None:
        """One batch came back."""
        with self._lock:
            second = self._at(now_s)
            second.rows += rows
            second.device_s += seconds
            totals = self._buckets.setdefault((model, bucket), BucketTotals())
            totals.runs += 1
            totals.rows += rows
            totals.real += real
            totals.computed += computed
            totals.device_s += seconds
            totals.wasted_s += seconds * (1 - real / computed)
            totals.cold += cold
            totals.left[reason] = totals.left.get(reason, 0) + 1

    def waiting(self, now_s: float, rows: int) -> None:
        """So many rows wait now; the most of a second is kept."""
        with self._lock:
            second = self._at(now_s)
            second.waiting = max(second.waiting, rows)

    def buckets(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Totals by model and bucket."""
        with self._lock:
            return {key: asdict(totals) for key, totals in self._buckets.items()}

    def series(self, now_s: float) -> dict[str, list[float | None]]:
        """One number a second, oldest first, the second in hand left out; None where nothing was answered."""
        last = int(now_s) - 1
        with self._lock:
            by_time = {second.at: second for second in self._seconds}
            seconds = [by_time.get(at, _Second(at)) for at in range(last - SECONDS + 1, last + 1)]
            return {
                "requests": [one.replies for one in seconds],
                "errors": [one.errors for one in seconds],
                "rows": [one.rows for one in seconds],
                "waiting": [one.waiting for one in seconds],
                "busy": [round(min(one.device_s, 1.0), 4) for one in seconds],
                "p50_ms": [_ms(one.percentile_s(0.5)) for one in seconds],
                "p99_ms": [_ms(one.percentile_s(0.99)) for one in seconds],
            }

    def _at(self, now_s: float) -> _Second:
        at = int(now_s)
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(_Second(at))
        return self._seconds[-1]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
