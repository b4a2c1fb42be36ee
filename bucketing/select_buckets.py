"""Choosing a few of many candidates so that every demand is served cheaply, and how far from the best.

This is the facility location problem with budgets. Candidates are added greedily by saving for what
they spend, then exchanged one for one while that helps (Teitz and Bart 1968). The bound is the
Lagrangian dual of "each demand is served once" (Cornuejols, Fisher and Nemhauser 1977), raised by
subgradient steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import FitError

Floats = NDArray[np.float64]

_ROUNDS = 300
_EXCHANGES = 200


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen candidates.

    Args:
        chosen: Rising places of the candidates.
        total: What serving all demands by them costs.
        bound: No choice within the budgets costs less.
    """

    chosen: tuple[int, ...]
    total: float
    bound: float


def select_buckets(serve: Floats, cover: NDArray[np.bool_], spend: Floats, budgets: Floats) -> Selection:
    """The cheapest candidates found within the budgets, one of them covering.

    Args:
        serve: `(demands, candidates)`, cost of serving a demand by a candidate, `inf` if it cannot.
        cover: `(candidates,)`, those of which one must be chosen; each serves every demand.
        spend: `(resources, candidates)`, what a candidate takes of each resource.
        budgets: `(resources,)`, how much of each resource there is; `inf` for no bound.

    Raises:
        FitError: if no covering candidate alone is within the budgets.
    """
    alone = np.flatnonzero(cover & (spend <= budgets[:, None]).all(axis=0))
    if not len(alone):
        raise FitError(
            "Some bucket must hold the largest item, and the program of each such bucket alone exceeds a "
            "budget. Raise the budget or lower the limits."
        )
    best: list[int] | None = None
    for start in alone[np.argsort(serve[:, alone].sum(axis=0))][:3]:
        chosen = _exchanged(_grown([int(start)], serve, spend, budgets), serve, cover, spend, budgets)
        if best is None or _total(serve, chosen) < _total(serve, best):
            best = chosen
    chosen = best or []
    total = _total(serve, chosen)
    return Selection(tuple(sorted(chosen)), total, min(total, _bound(serve, cover, spend, budgets, total)))


def _total(serve: Floats, chosen: list[int]) -> float:
    return float(serve[:, chosen].min(axis=1).sum())


def _grown(chosen: list[int], serve: Floats, spend: Floats, budgets: Floats) -> list[int]:
    """Add the candidate that saves most for the share of the budgets it takes, until none can."""
    shares = np.max(spend / budgets[:, None], axis=0)
    now = serve[:, chosen].min(axis=1)
    while True:
        left = budgets - spend[:, chosen].sum(axis=1)
        saving = (now[:, None] - np.minimum(now[:, None], serve)).sum(axis=0)
        saving[(spend > left[:, None] * (1 + 1e-12)).any(axis=0)] = 0
        saving[chosen] = 0
        place = int(np.argmax(saving / np.maximum(shares, 1e-12)))
        if saving[place] <= 1e-12 * now.sum():
            return chosen
        chosen = [*chosen, place]
        now = np.minimum(now, serve[:, place])


def _exchanged(
    chosen: list[int], serve: Floats, cover: NDArray[np.bool_], spend: Floats, budgets: Floats
) -> list[int]:
    """Swap one chosen candidate for another as long as it lowers the total, then fill up again."""
    for _ in range(_EXCHANGES):
        total = _total(serve, chosen)
        best = (total * (1 - 1e-9), chosen)
        for leaving in chosen:
            rest = [place for place in chosen if place != leaving]
            kept = serve[:, rest].min(axis=1) if rest else np.full(len(serve), np.inf)
            totals = np.minimum(kept[:, None], serve).sum(axis=0)
            used = spend[:, rest].sum(axis=1)[:, None] + spend
            totals[(used > budgets[:, None] * (1 + 1e-12)).any(axis=0)] = np.inf
            if not cover[rest].any():
                totals[~cover] = np.inf
            place = int(np.argmin(totals))
            if totals[place] < best[0]:
                best = float(totals[place]), [*rest, place]
        if best[1] is chosen:
            return chosen
        chosen = _grown(best[1], serve, spend, budgets)
    return chosen


def _bound(serve: Floats, cover: NDArray[np.bool_], spend: Floats, budgets: Floats, total: float) -> float:
    """The highest Lagrangian bound found, at least that of unlimited budgets."""
    prices = np.partition(serve, min(1, serve.shape[1] - 1), axis=1)[:, min(1, serve.shape[1] - 1)]
    prices = np.where(np.isfinite(prices), prices, serve.min(axis=1))
    best = float(serve.min(axis=1).sum())
    step, stale = 1.0, 0
    for _ in range(_ROUNDS):
        worth = np.minimum(serve - prices[:, None], 0.0)
        value, opened = _cheapest(worth.sum(axis=0), cover, spend, budgets)
        value += float(prices.sum())
        stale = 0 if value > best else stale + 1
        best = max(best, value)
        if stale >= 15:
            step, stale = step / 2, 0
        slope = 1.0 - (serve[:, opened] < prices[:, None]).sum(axis=1)
        length = float(slope @ slope)
        if length == 0 or total - value <= 1e-12 * total:
            break
        prices = prices + step * (total - value) / length * slope
    return best


def _cheapest(
    worth: Floats, cover: NDArray[np.bool_], spend: Floats, budgets: Floats
) -> tuple[float, list[int]]:
    """A lower bound of the least summed worth within the budgets, and the candidates that come near it.

    Each budget alone, with fractions allowed, bounds the choice from below, so the largest of these
    bounds does too. A covering candidate must be in it, which bounds it once more.
    """
    values: list[tuple[float, list[int]]] = []
    forced = float(worth[cover].min())
    for used, budget in zip(spend, budgets.tolist(), strict=True):
        order = np.argsort(worth / np.maximum(used, 1e-100), kind="stable")
        order = order[worth[order] < 0]
        gone = np.cumsum(used[order])
        whole = int(np.searchsorted(gone, budget * (1 + 1e-12), side="right"))
        value = float(worth[order[:whole]].sum())
        if whole < len(order):
            left = budget - (float(gone[whole - 1]) if whole else 0.0)
            value += float(worth[order[whole]]) * max(left, 0.0) / float(used[order[whole]])
        values.append((value, order[:whole].tolist()))
    value, opened = max(values, key=lambda pair: pair[0])
    return max(value, _with_cover(worth, spend, budgets, forced)), opened


def _with_cover(worth: Floats, spend: Floats, budgets: Floats, forced: float) -> float:
    """The bound by number alone when one place is taken by the best covering candidate."""
    fits = float(np.min(budgets / np.maximum(spend.min(axis=1), 1e-100)))
    if not fits < len(worth):
        return -np.inf
    others = int(fits * (1 + 1e-12)) - 1
    return forced + float(np.sort(worth)[:others].sum()) if others >= 0 else -np.inf
