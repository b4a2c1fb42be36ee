"""The ladder that is provably the best for a histogram of sizes.

For sizes s_1 < ... < s_n with N_j items up to s_j, the cost c(b) of an item at rung b and k programs:

    D_k(j) = min over i < j of D_{k-1}(i) + (N_j - N_i) c(s_j) + price(s_j)

Rungs need only be tried at observed sizes (rounded up to the alignment) and at the limit. Where c does
not fall as b rises, the summand is Monge, so the best i never falls as j rises and a layer takes
O(n log n) by divide and conquer. Here the halving goes level by level, so that each level is a few
NumPy calls over all its midpoints at once. The price only depends on j and keeps all of this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .errors import FitError
from .ladder import Ladder
from .observed import Observed, observed

Overflow = Literal["raise", "clip", "drop"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LadderFit:
    """The best ladder of one number of programs.

    Args:
        ladder: Its rungs; the last one is the limit.
        cost: The summed cost of the observed items, in the unit of the cost function.
        price: The summed price of the rungs; 0 without a price.
        waste: 1 - real / padded elements of the items it was fitted to.
    """

    ladder: Ladder
    cost: float
    price: float
    waste: float


def fit_ladder(
    sizes: Observed,
    programs: int,
    *,
    limit: int | None = None,
    align: int = 1,
    minimum: int = 1,
    cost: Callable[[int], float] | None = None,
    overflow: Overflow = "raise",
) -> Ladder:
    """The ladder of at most `programs` rungs with the least summed cost: exact, not a heuristic.

    Args:
        sizes: What was observed.
        programs: The most rungs; more than there are distinct sizes changes nothing.
        limit: The last rung, at least the largest size; by default the largest size, aligned.
        align: Every rung but the limit is a multiple of it.
        minimum: No rung is below it, unless the limit is.
        cost: Cost of one item at a rung; it must not fall as rungs rise. By default the rung itself,
            so the fit has the least padding.
        overflow: What to do with sizes above `limit`: raise, count them at the limit (as a server
            that cuts) or leave them out (as a server that refuses).

    Raises:
        TraceError: if nothing was observed, or something that is not a size.
        FitError: if a parameter is out of range, a size is above the limit, or costs fall or are NaN.
    """
    return fit_curve(
        sizes, programs, limit=limit, align=align, minimum=minimum, cost=cost, overflow=overflow
    )[-1].ladder


def fit_curve(
    sizes: Observed,
    programs: int,
    *,
    limit: int | None = None,
    align: int = 1,
    minimum: int = 1,
    cost: Callable[[int], float] | None = None,
    price: Callable[[int], float] | None = None,
    overflow: Overflow = "raise",
) -> tuple[LadderFit, ...]:
    """The best ladders of exactly 1, 2, ... programs, as far as there are sizes for them.

    Args:
        sizes: As in `fit_ladder`, like all that is not named here.
        programs: The most rungs.
        limit: The last rung.
        align: Rungs but the limit are multiples of it.
        minimum: The lowest rung allowed.
        cost: Cost of one item at a rung.
        price: What it costs to have a rung, in the same unit as the summed cost.
        overflow: What to do with sizes above the limit.

    Raises:
        TraceError: as in `fit_ladder`.
        FitError: as in `fit_ladder`.
    """
    if programs < 1:
        raise FitError(f"A ladder needs at least 1 program; got {programs}.")
    values, counts, limit = bounded(*observed(sizes), limit, align, overflow)
    rungs, held = candidates(values, counts, limit, align, minimum)
    costs = _evaluated(cost, rungs, "cost") if cost else rungs.astype(np.float64)
    if (np.diff(costs) < 0).any():
        place = int(np.argmax(np.diff(costs) < 0))
        raise FitError(
            f"The cost must not fall as rungs rise; got {costs[place]} at {rungs[place]} and "
            f"{costs[place + 1]} at {rungs[place + 1]}. Smooth it with np.maximum.accumulate."
        )
    prices = _evaluated(price, rungs, "price") if price else np.zeros(len(rungs))
    real = float(values @ counts)
    fits: list[LadderFit] = []
    for chosen in optimal_rungs(np.cumsum(held), costs, prices, min(programs, len(rungs))):
        items = np.diff(np.cumsum(held)[chosen], prepend=0.0)
        waste = 1 - real / float(items @ rungs[chosen])
        ladder = Ladder(tuple(rungs[chosen].tolist()))
        fits.append(LadderFit(ladder, float(items @ costs[chosen]), float(prices[chosen].sum()), waste))
    return tuple(fits)


def bounded(
    values: Ints, counts: Floats, limit: int | None, align: int, overflow: Overflow
) -> tuple[Ints, Floats, int]:
    """Sizes and counts within the limit, and the limit."""
    if align < 1:
        raise FitError(f"align is at least 1; got {align}.")
    if limit is None:
        limit = max(1, -(-int(values[-1]) // align) * align)
    if limit < 1:
        raise FitError(f"A limit is at least 1; got {limit}.")
    if values[-1] > limit:
        if overflow == "raise":
            raise FitError(
                f"Observed sizes are at most the limit of {limit}; got {values[-1]}. Raise the limit, or "
                "pass overflow='clip' to cut them or overflow='drop' to leave them out."
            )
        if overflow == "drop":
            values, counts = values[values <= limit], counts[values <= limit]
            if not len(values):
                raise FitError(f"No observed size is within the limit of {limit}. Raise the limit.")
    return np.minimum(values, limit), counts, limit


def candidates(values: Ints, counts: Floats, limit: int, align: int, minimum: int) -> tuple[Ints, Floats]:
    """Sizes worth a rung, rising, the limit last; and how many items round up to each."""
    if minimum < 1:
        raise FitError(f"minimum is at least 1; got {minimum}.")
    rounded = np.minimum(-(-np.maximum(values, minimum) // align) * align, limit)
    rungs, inverse = np.unique(np.append(rounded, limit), return_inverse=True)
    return rungs, np.bincount(inverse, weights=np.append(counts, 0.0)).astype(np.float64)


def optimal_rungs(upto: Floats, costs: Floats, prices: Floats, programs: int) -> list[Ints]:
    """For each number of programs from 1, the places of the rungs of the best ladder.

    Args:
        upto: `(n,)`, items up to each candidate.
        costs: `(n,)`, non-decreasing cost of an item at each candidate.
        prices: `(n,)`, price of each candidate.
        programs: From 1 to n.
    """
    count = len(upto)
    # Place i of `least` is the best of the first i candidates, so `upto` gets a 0 in front.
    items = np.concatenate([[0.0], upto])
    least = np.concatenate([[np.inf], upto * costs + prices])
    parents: list[NDArray[np.int32]] = [np.zeros(count + 1, np.int32)]
    for layer in range(2, programs + 1):
        least, parent = _layer(least, items, costs, prices, layer)
        parents.append(parent)
    ladders: list[Ints] = []
    for layer in range(programs):
        places, place = [], count
        for parent in reversed(parents[: layer + 1]):
            places.append(place - 1)
            place = int(parent[place])
        ladders.append(np.array(places[::-1], np.int64))
    return ladders


def _layer(
    before: Floats, items: Floats, costs: Floats, prices: Floats, layer: int
) -> tuple[Floats, NDArray[np.int32]]:
    """One more program: the new minima, and for each the candidate before its last rung."""
    count = len(costs)
    least = np.full(count + 1, np.inf)
    parent = np.zeros(count + 1, np.int32)
    total = count - layer + 1
    # Places 1..total stand for candidates layer..count; 0 and total + 1 bound what was not found yet.
    best = np.full(total + 2, layer - 1, np.int64)
    stride = 1 << (total.bit_length() - 1)
    while stride:
        places = np.arange(stride, total + 1, 2 * stride)
        ends = places + layer - 1
        lows = best[places - stride]
        highs = np.where(places + stride <= total, best[np.minimum(places + stride, total + 1)], ends - 1)
        highs = np.minimum(highs, ends - 1)
        lengths = highs - lows + 1
        offsets = np.cumsum(lengths) - lengths
        starts = np.arange(int(lengths.sum())) + np.repeat(lows - offsets, lengths)
        totals = before[starts] + (np.repeat(items[ends], lengths) - items[starts]) * np.repeat(
            costs[ends - 1], lengths
        )
        minima = np.minimum.reduceat(totals, offsets)
        hits = np.flatnonzero(totals == np.repeat(minima, lengths))[::-1]
        # Assigned from the right, so of equal minima the leftmost stays.
        best[places[np.searchsorted(offsets, hits, side="right") - 1]] = starts[hits]
        least[ends] = minima + prices[ends - 1]
        parent[ends] = best[places]
        stride //= 2
    return least, parent


def _evaluated(function: Callable[[int], float], rungs: Ints, what: str) -> Floats:
    values = np.array([function(rung) for rung in rungs.tolist()], np.float64)
    for rung, value in zip(rungs.tolist(), values.tolist(), strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise FitError(f"A {what} is a finite number of at least 0; got {value!r} for rung {rung}.")
    return values
