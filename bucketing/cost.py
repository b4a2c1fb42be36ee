"""What a run costs: a prior from the program's work, replaced by what was measured.

A size does not tell the time: buckets with the same number of tokens differ about twofold. Three
sources are laid over each other, the better one anchoring the worse: measured seconds, then a
roofline (Williams et al. 2009) of the program's flops and bytes, then a guess from element counts.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median, median_low

import numpy as np
from numpy.typing import NDArray

from .bucket import Bucket
from .errors import CostError
from .grid import Grid

# A median of five forgets one outlier at once and follows a real change after three runs.
_WINDOW = 5
_CLIP = 1.5
_DECAY = 0.1
# Below this change the published number stays, so that noise does not make every reader rebuild.
_PUBLISH = 0.03
# A first run is 10 to 30 % too slow on a CPU, and some are three times so: what nobody runs stays believed
# dear, for no traffic corrects it. So a bucket is hoped to be cheaper until it ran this often.
_TRIED = 3
_HOPE = 0.2


def elements_prior(bucket: Bucket) -> float:
    """Seconds guessed from the shape alone: 50 µs a call and 1 µs an element.

    Only the ratio matters before the first measurement; it makes a few rows padded to the next
    bucket cheaper than one call more.
    """
    return 50e-6 + 1e-6 * bucket.elements


class CostModel:
    """Predicted seconds of each bucket, learned online.

    A larger bucket is never predicted cheaper than one it contains, as long as `prior` is not: an
    unmeasured bucket lies between the measured ones inside it and around it. Unmeasured buckets
    are scaled by the median of measured / prior. Of measured buckets that contradict each other the
    smaller one is lowered, since a latency is spoilt upwards far more often than downwards.

    Plans are made from `table`, which hopes: a bucket measured fewer than three times counts a fifth
    less than measured, or as its scaled prior where that is less, and so is run, and corrected, when
    it is about as good as the best (optimism under uncertainty, as in Auer, Cesa-Bianchi and Fischer
    2002). A wrong hope costs each bucket two runs; `seconds` never hopes.

    Args:
        prior: Seconds guessed for a bucket; it must not fall as sizes rise. None means
            `elements_prior`.
        flops_per_s: Rate for `set_prior`; only ratios matter once something was measured.
        bytes_per_s: Memory rate for `set_prior`.
        overhead_s: Fixed cost of a call for `set_prior`.
    """

    def __init__(
        self,
        prior: Callable[[Bucket], float] | None = None,
        *,
        flops_per_s: float = 1e11,
        bytes_per_s: float = 1e10,
        overhead_s: float = 50e-6,
    ) -> None:
        self._prior = elements_prior if prior is None else prior
        self._rates = (flops_per_s, bytes_per_s, overhead_s)
        self._roofline: dict[Bucket, float] = {}
        self._estimates: dict[Bucket, _Estimate] = {}
        self._published: dict[Bucket, float] = {}
        self._untried: set[Bucket] = set()
        self._seconds: dict[Bucket, float] = {}
        self._tables: dict[Grid, NDArray[np.float64]] = {}
        self._guesses: dict[Bucket, float] = {}
        self._bases: dict[tuple[Bucket, ...], NDArray[np.float64]] = {}
        self.version = 0

    def seconds(self, bucket: Bucket) -> float:
        """Predicted seconds of one run of this bucket."""
        known = self._seconds.get(bucket)
        if known is None:
            known = self._seconds[bucket] = float(self._predict((bucket,))[0])
        return known

    def table(self, grid: Grid) -> NDArray[np.float64]:
        """Seconds to plan with of `grid.buckets` in order, float64 `(buckets,)`, read-only; hopeful.

        The same array is returned until `version` changes.
        """
        table = self._tables.get(grid)
        if table is None:
            table = self._tables[grid] = self._predict(grid.buckets, hopeful=True)
            table.setflags(write=False)
        return table

    def observe(self, bucket: Bucket, seconds: float) -> None:
        """Learn one measured run; an outlier moves the estimate by a few percent at most.

        Raises:
            CostError: if `seconds` is NaN, infinite or negative; nothing is learned.
        """
        value = max(_checked(bucket, seconds, "measured"), 1e-9)
        estimate = self._estimates.get(bucket)
        if estimate is None:
            estimate = self._estimates[bucket] = _Estimate()
        estimate.add(value)
        published = self._published.get(bucket)
        if published is None or abs(estimate.value - published) > _PUBLISH * published:
            self._published[bucket] = estimate.value
            self._changed()
        if estimate.runs < _TRIED:
            self._untried.add(bucket)
        elif bucket in self._untried:
            self._untried.remove(bucket)
            self._changed()

    def restart(self, bucket: Bucket, seconds: float) -> None:
        """Forget what was learned of a bucket, whose program is another one now, and learn a first run.

        Raises:
            CostError: as `observe`; nothing changes.
        """
        _checked(bucket, seconds, "measured")
        self._estimates.pop(bucket, None)
        self._published.pop(bucket, None)
        self.observe(bucket, seconds)

    def hopes(self, bucket: Bucket) -> bool:
        """Whether `table` hopes this bucket to be cheaper than it was measured."""
        return bucket in self._untried

    def set_prior(self, bucket: Bucket, *, flops: float | None = None, bytes: float | None = None) -> None:  # noqa: A002
        """Anchor the prior of a bucket to its program's work.

        Args:
            bucket: The bucket the program was compiled for.
            flops: Floating-point operations of one run.
            bytes: Bytes one run reads and writes.

        Raises:
            CostError: if both are missing, or one is NaN, infinite or negative.
        """
        if flops is None and bytes is None:
            raise CostError(f"A prior needs flops, bytes or both; got neither for {bucket}.")
        flops_per_s, bytes_per_s, overhead_s = self._rates
        work_s = max(
            _checked(bucket, flops or 0.0, "flops") / flops_per_s,
            _checked(bucket, bytes or 0.0, "bytes") / bytes_per_s,
        )
        self._roofline[bucket] = overhead_s + work_s
        self._bases.clear()
        self._changed()

    def measured(self) -> dict[Bucket, float]:
        """The learned seconds of each bucket that ran, before they are made monotone."""
        return {bucket: estimate.value for bucket, estimate in self._estimates.items()}

    def _changed(self) -> None:
        self.version += 1
        self._seconds.clear()
        self._tables.clear()

    def _predict(self, buckets: Sequence[Bucket], *, hopeful: bool = False) -> NDArray[np.float64]:
        published = dict(self._published)  # another thread may publish meanwhile
        scale = _ratio(published, self._base(tuple(published)))
        known = self._hoped(published, scale) if hopeful and self._untried else published
        return _anchored(buckets, known, scale * self._base(buckets))

    def _hoped(self, published: Mapping[Bucket, float], scale: float) -> dict[Bucket, float]:
        """What was measured, and what is hoped where it was hardly tried, between those that were tried."""
        untried = [bucket for bucket in published if bucket in self._untried]
        tried = {bucket: value for bucket, value in published.items() if bucket not in untried}
        values = np.array([published[bucket] for bucket in untried])
        hope = np.minimum((1 - _HOPE) * values, scale * self._base(untried))
        held = np.minimum(values, _anchored(untried, tried, hope))
        return {**published, **dict(zip(untried, held.tolist(), strict=True))}

    def _base(self, buckets: Sequence[Bucket]) -> NDArray[np.float64]:
        # Priors seldom change, measured times with every other batch of a busy server.
        found = self._bases.get(asked := tuple(buckets))
        if found is None:
            roofline = dict(self._roofline)  # as above
            scale = _ratio(roofline, self._guess(tuple(roofline)))
            found = self._bases[asked] = _anchored(buckets, roofline, scale * self._guess(buckets))
        return found

    def _guess(self, buckets: Sequence[Bucket]) -> NDArray[np.float64]:
        for bucket in buckets:
            if bucket not in self._guesses:
                self._guesses[bucket] = _checked(bucket, self._prior(bucket), "prior")
        return np.array([self._guesses[bucket] for bucket in buckets])


class _Estimate:
    """A decayed mean of clipped observations around the median of the last few."""

    __slots__ = ("recent", "runs", "value")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_WINDOW)
        self.runs = 0
        self.value = 0.0

    def add(self, seconds: float) -> None:
        self.recent.append(seconds)
        self.runs += 1
        # The low median, since a latency is spoilt upwards far more often than downwards.
        middle = median_low(self.recent)
        if self.runs < _WINDOW:  # few, and the first of them a warm-up's
            self.value = middle
            return
        low, high = middle / _CLIP, middle * _CLIP
        before = min(max(self.value, low), high)
        rate = max(1 / self.runs, _DECAY)
        self.value = before + rate * (min(max(seconds, low), high) - before)


def _anchored(
    buckets: Sequence[Bucket], anchors: Mapping[Bucket, float], fallback: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The anchors where they are known, and between those inside and those around elsewhere.

    Among anchors that contradict each other the smaller bucket is lowered to the larger one's time.
    """
    if not anchors or not buckets:
        return fallback
    axes = buckets[0].axes
    for bucket in (*buckets, *anchors):
        if bucket.axes != axes:
            raise CostError(f"A cost model serves buckets of the same axes; got {axes} and {bucket.axes}.")
    sizes = np.array([bucket.sizes for bucket in buckets])[:, None, :]
    known = np.array([bucket.sizes for bucket in anchors])[None, :, :]
    values = np.fromiter(anchors.values(), float)
    values = np.where((known[0, :, None] <= known).all(-1), values, np.inf).min(axis=1)
    inside = np.where((sizes >= known).all(-1), values, 0.0).max(axis=1)
    around = np.where((sizes <= known).all(-1), values, np.inf).min(axis=1)
    held: NDArray[np.float64] = np.maximum(inside, np.minimum(fallback, around))
    return held


def _ratio(known: Mapping[Bucket, float], guessed: NDArray[np.float64]) -> float:
    ratios = [value / guess for value, guess in zip(known.values(), guessed, strict=True) if guess > 0]
    return median(ratios) if ratios else 1.0


def _checked(bucket: Bucket, value: float, what: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise CostError(f"A cost is a finite number of at least 0; got {what} {value!r} for bucket {bucket}.")
    return float(value)
