"""The fitted scheme: the exactly optimal ladder of observed sizes, for any limit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .fit import Overflow, fit_ladder
from .ladder import Ladder
from .observed import Observed, observed
from .schemes import Scheme


@dataclass(frozen=True, slots=True)
class _Fitted:
    name: str
    sizes: tuple[int, ...] = field(repr=False)
    counts: tuple[float, ...] = field(repr=False)
    programs: int
    align: int
    minimum: int
    cost: Callable[[int], float] | None
    overflow: Overflow

    def ladder(self, limit: int) -> Ladder:
        """The best ladder of at most `programs` rungs that ends at `limit`.

        Raises:
            FitError: if an observed size is above `limit` and `overflow` is "raise".
        """
        counted = dict(zip(self.sizes, self.counts, strict=True))
        return fit_ladder(
            counted,
            self.programs,
            limit=limit,
            align=self.align,
            minimum=self.minimum,
            cost=self.cost,
            overflow=self.overflow,
        )


def fitted(
    histogram: Observed,
    programs: int,
    *,
    align: int = 1,
    minimum: int = 1,
    cost: Callable[[int], float] | None = None,
    overflow: Overflow = "raise",
) -> Scheme:
    """A scheme whose ladder is `fit_ladder` of these sizes.

    The observation is copied, so the scheme does not change when a live histogram does.

    Args:
        histogram: What was observed.
        programs: The most rungs.
        align: Every rung but the limit is a multiple of it.
        minimum: No rung is below it, unless the limit is.
        cost: Cost of one item at a rung; by default the rung itself.
        overflow: What to do with observed sizes above the limit.

    Raises:
        TraceError: if nothing was observed, or something that is not a size.
    """
    sizes, counts = observed(histogram)
    kept = tuple(sizes.tolist()), tuple(np.asarray(counts, np.float64).tolist())
    return _Fitted(f"fitted:{programs}", *kept, programs, align, minimum, cost, overflow)
