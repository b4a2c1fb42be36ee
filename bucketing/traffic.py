"""What arrives: a decayed histogram of sizes, and the moment it no longer fits the ladder.

Time is an argument, in seconds of any monotonic clock. Weights halve every `half_life_s`; instead of
touching old counts at each tick, new ones are added with a growing weight and everything is scaled
back once in a while, so that adding is one dictionary update.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError

# 2**40 keeps 12 digits of the oldest counts that still matter.
_RESCALE = 2.0**40


class Histogram:
    """Counts of sizes that fade with age.

    Args:
        half_life_s: Seconds after which a count is worth half; None means that nothing fades.

    Raises:
        TraceError: if `half_life_s` is not positive.
    """

    def __init__(self, half_life_s: float | None = None) -> None:
        if half_life_s is not None and not half_life_s > 0:
            raise TraceError(f"A half-life is above 0 seconds, or None for no decay; got {half_life_s!r}.")
        self.half_life_s = half_life_s
        self._weights: dict[int, float] = {}
        self._zero_s: float | None = None
        self._now_s = -math.inf

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "Histogram":
        """The plain histogram of a list of sizes, without decay.

        Raises:
            TraceError: if a size is negative or no integer.
        """
        histogram = cls()
        for size in sizes:
            histogram.add(int(size) if float(size).is_integer() else size)
        return histogram

    def add(self, size: int, now_s: float = 0.0, count: float = 1.0) -> None:
        """Count a size that arrived now; a time before the latest one counts as the latest.

        Raises:
            TraceError: if the size is negative or no integer, the count NaN, infinite or negative, or
                the time NaN or infinite.
        """
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 0:
            raise TraceError(f"A size is an integer of at least 0; got {size!r}.")
        if not (0 <= count < math.inf):
            raise TraceError(f"A count is a finite number of at least 0; got {count!r}.")
        weight = self._weight_at(now_s)
        self._weights[int(size)] = self._weights.get(int(size), 0.0) + count * weight

    def arrays(self, now_s: float | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Sizes, rising int64 `(n,)`, and their decayed counts, float64 `(n,)`.

        Args:
            now_s: The time to decay to; by default that of the latest arrival.
        """
        scale = self._weight_at(self._now_s if now_s is None else now_s) if self._weights else 1.0
        sizes = np.array(sorted(self._weights), np.int64)
        return sizes, np.array([self._weights[size] for size in sizes.tolist()], np.float64) / scale

    def total(self, now_s: float | None = None) -> float:
        """The sum of the decayed counts."""
        return float(self.arrays(now_s)[1].sum())

    def mean(self) -> float:
        """The mean size.

        Raises:
            TraceError: if nothing was counted.
        """
        sizes, counts = self._some()
        return float(sizes @ counts / counts.sum())

    def percentile(self, percent: float) -> int:
        """The smallest size that at least `percent` % of what arrived does not exceed.

        Raises:
            TraceError: if nothing was counted or `percent` is not from 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise TraceError(f"A percentile is from 0 to 100; got {percent!r}.")
        sizes, counts = self._some()
        below = np.cumsum(counts)
        place = int(np.searchsorted(below, below[-1] * percent / 100 * (1 - 1e-12)))
        return int(sizes[min(place, len(sizes) - 1)])

    def merge(self, other: "Histogram") -> "Histogram":
        """A new histogram of both, such as of two replicas, decayed to the later of their times.

        Raises:
            TraceError: if the half-lives differ.
        """
        if other.half_life_s != self.half_life_s:
            raise TraceError(
                f"Only histograms of one half-life merge; got {self.half_life_s} and {other.half_life_s}."
            )
        merged = Histogram(self.half_life_s)
        now_s = max(self._now_s, other._now_s)
        for part in (self, other):
            for size, count in zip(*part.arrays(now_s if part._weights else None), strict=True):
                merged.add(int(size), now_s, float(count))
        return merged

    def to_dict(self) -> dict[str, Any]:
        """The histogram as plain JSON values; `from_dict` reads it back."""
        sizes, counts = self.arrays()
        now_s = self._now_s if self._weights else None
        return {
            "half_life_s": self.half_life_s,
            "now_s": now_s,
            "sizes": sizes.tolist(),
            "counts": counts.tolist(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, now_s: float | None = None) -> "Histogram":
        """The histogram that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.
            now_s: The time to date the counts to, since a monotonic clock starts anew with each
                process; by default the time they were saved with.

        Raises:
            TraceError: if a key is missing or a value is not what `to_dict` writes.
        """
        try:
            histogram = Histogram(data["half_life_s"])
            saved_s = data["now_s"] if now_s is None else now_s
            for size, count in zip(data["sizes"], data["counts"], strict=True):
                histogram.add(size, saved_s, count)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"A saved histogram is what to_dict() returned; got {error!r}.") from error
        return histogram

    def _weight_at(self, now_s: float) -> float:
        """The weight of one arrival at this time, relative to the stored weights."""
        if not math.isfinite(now_s):
            raise TraceError(f"A time is a finite number of seconds; got {now_s!r}.")
        self._now_s = max(now_s, self._now_s)
        if self.half_life_s is None:
            return 1.0
        if self._zero_s is None:
            self._zero_s = self._now_s
        halvings = (self._now_s - self._zero_s) / self.half_life_s
        if halvings >= 40:
            shrink = 2.0 ** -min(halvings, 2000.0) if halvings < 1070 else 0.0
            faded = ((size, weight * shrink) for size, weight in self._weights.items())
            # What has faded to nothing is forgotten, so memory stays that of recent traffic.
            self._weights = {size: weight for size, weight in faded if weight > 1 / _RESCALE}
            self._zero_s, halvings = self._now_s, 0.0
        return float(2.0**halvings)

    def _some(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        sizes, counts = self.arrays()
        if counts.sum() <= 0:
            raise TraceError("Nothing was counted yet; add sizes first.")
        return sizes, counts


class DriftDetector:
    """Says once that a ladder no longer fits, and not again until it has fitted in between.

    Args:
        raise_at: Padding waste, from 0 to 1, above which the ladder counts as drifted.
        clear_at: Waste below which it counts as fitting again; at most `raise_at`.
        hold_s: Seconds the waste must stay above `raise_at` before it counts.

    Raises:
        TraceError: if the thresholds are not `0 <= clear_at <= raise_at < 1`, or `hold_s` is negative.
    """

    def __init__(self, raise_at: float, clear_at: float, hold_s: float = 0.0) -> None:
        if not 0 <= clear_at <= raise_at < 1 or not hold_s >= 0:
            raise TraceError(
                f"Drift needs 0 <= clear_at <= raise_at < 1 and hold_s >= 0; got clear_at={clear_at!r}, "
                f"raise_at={raise_at!r}, hold_s={hold_s!r}."
            )
        self.raise_at, self.clear_at, self.hold_s = raise_at, clear_at, hold_s
        self.drifted = False
        self._above_since_s: float | None = None

    def update(self, waste: float, now_s: float) -> bool:
        """Look at the waste of now; True exactly when the ladder has become unfit.

        Raises:
            TraceError: if the waste is NaN.
        """
        if math.isnan(waste):
            raise TraceError("A waste is a number from 0 to 1; got NaN.")
        if waste <= self.raise_at:
            self._above_since_s = None
        elif self._above_since_s is None:
            self._above_since_s = now_s
        if self.drifted:
            self.drifted = waste > self.clear_at
            return False
        self.drifted = self._above_since_s is not None and now_s - self._above_since_s >= self.hold_s
        return self.drifted

    def rearm(self) -> None:
        """Start afresh, after a new ladder was put in place."""
        self.drifted = False
        self._above_since_s = None
