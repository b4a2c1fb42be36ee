"""Which variant of a servable runs in a bucket: the one that was measured to be the fastest.

A variant is another way to the same answers: another apply function (attention dense or blockwise, layers
scanned or unrolled), or the bucket as a case of the switched program instead of a program of its own. Each is
timed in each bucket, since what wins at 1 x 16 loses at 8 x 256 and on the next platform; with a store the
times are remembered, and a later start makes the winners only.
"""

from collections.abc import Sequence

from ..bucketing import Bucket

STATIC, SWITCHED, TUNED = "static", "switched", "tuned"
# Two timings of one program differ by so much; the variant in place stays unless it is clearly beaten.
_MARGIN = 0.03


class Tuner:
    """Measured seconds of each variant in each bucket, and the choice among them.

    Args:
        variants: names, at least one; the first is the one to begin with.
    """

    def __init__(self, variants: Sequence[str]) -> None:
        self.variants = tuple(variants)
        self._seconds: dict[Bucket, dict[str, float]] = {}

    @property
    def needed(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.variants) > 1

    def record(self, bucket: Bucket, variant: str, seconds: float) -> None:
        """Learn how long one run of a variant takes."""
        self._seconds.setdefault(bucket, {})[variant] = seconds

    def missing(self, bucket: Bucket) -> list[str]:
        """Variants that were not timed in this bucket, in order."""
        known = self._seconds.get(bucket, {})
        return [variant for variant in self.variants if variant not in known]

    def best(self, bucket: Bucket) -> str:
        """The fastest of those that were timed; an earlier one unless it is beaten by 3 %."""
        known = self._seconds.get(bucket, {})
        best = self.variants[0]
        for variant in self.variants:
            if variant in known and (best not in known or known[variant] < (1 - _MARGIN) * known[best]):
                best = variant
        return best
