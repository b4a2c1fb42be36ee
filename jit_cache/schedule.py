"""In which order programs are made: what pays most for its compile first.

After the bucket that covers everything, each next one is that of greatest (traffic share x seconds saved) /
compile seconds, given those before it: the greedy rule for a budgeted coverage problem (Khuller, Moss and
Naor 1999). Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bucketing import Bucket, CostModel, Grid

__all__ = ["Shape", "covering_bucket", "saved_by_bucket", "value_order"]

Seconds = Callable[[Bucket], float]


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one shape: how many rows, their sizes in the order of the item axes, how often."""

    rows: int
    sizes: tuple[int, ...]
    count: float = 1.0


def covering_bucket(grid: Grid) -> Bucket:
    """The smallest bucket that holds an item of every admissible size."""
    return grid.smallest(1, tuple(grid.limits[axis] for axis in grid.item_axes))


def value_order(
    grid: Grid,
    shapes: Sequence[Shape],
    *,
    seconds: Seconds | None = None,
    compile_s: Seconds | None = None,
) -> list[Bucket]:
    """Buckets by what they save for their compile; those that save nothing come last, cheap to dear.

    Args:
        grid: all buckets.
        shapes: what arrives; shapes beyond the grid's limits are left out.
        seconds: predicted seconds of one run; by default guessed from the sizes.
        compile_s: predicted seconds of a compile; by default all take the same.
    """
    covering = covering_bucket(grid)
    rest = sorted((one for one in grid.buckets if one != covering), key=lambda one: one.elements)
    costs, counts = _costs([covering, *rest], shapes, seconds or CostModel().seconds)
    compiles = np.array([1.0 if compile_s is None else max(compile_s(one), 1e-9) for one in rest], np.float64)
    now, chosen = costs[:, 0], [covering]
    left = list(range(len(rest)))
    while left:
        saved = counts @ np.maximum(now[:, None] - costs[:, 1:][:, left], 0.0)
        best = int(np.argmax(saved / compiles[left]))
        if saved[best] <= 0:
            break
        chosen.append(rest[left[best]])
        now = np.minimum(now, costs[:, 1 + left.pop(best)])
    return chosen + [rest[index] for index in left]


def saved_by_bucket(
    grid: Grid, shapes: Sequence[Shape], seconds: Seconds | None = None
) -> dict[Bucket, float]:
    """What each bucket is worth: the seconds that its own share of the traffic would lose without it.

    The loss is taken against the next best bucket; the covering one counts everything it holds alone.
    """
    buckets = list(grid.buckets)
    costs, counts = _costs(buckets, shapes, seconds or CostModel().seconds)
    worth = np.zeros(len(buckets))
    if len(costs):
        order = np.argsort(costs, axis=1, kind="stable")
        rows = np.arange(len(costs))
        best = costs[rows, order[:, 0]]
        second = costs[rows, order[:, 1]] if len(buckets) > 1 else 2 * best
        lost = np.where(np.isfinite(second), second - best, best)
        np.add.at(worth, order[:, 0], counts * lost)
    return dict(zip(buckets, worth.tolist(), strict=True))


def _costs(
    buckets: Sequence[Bucket], shapes: Sequence[Shape], seconds: Seconds
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of each shape in each bucket, infinite where it does not fit, and the shapes' counts."""
    table = np.array([one.sizes for one in buckets], np.int64)
    runs_s = np.array([seconds(one) for one in buckets], np.float64)
    counts: dict[tuple[int, ...], float] = {}
    for shape in shapes:
        key = (shape.rows, *shape.sizes)
        counts[key] = counts.get(key, 0.0) + shape.count
    found = np.array(list(counts), np.int64).reshape(len(counts), table.shape[1])
    fits = np.all(table[None, :, 1:] >= found[:, None, 1:], axis=2)
    # More rows than a bucket has run as several batches of it.
    batches = -(-found[:, :1] // table[None, :, 0])
    costs = np.where(fits, batches * runs_s, np.inf)
    admissible = np.any(fits, axis=1)
    weights = np.array(list(counts.values()), np.float64)
    return costs[admissible], weights[admissible]
