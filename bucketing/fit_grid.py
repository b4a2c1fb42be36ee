"""The joint fit of batch and item sizes: a grid under a budget of programs, seconds and bytes.

What is fitted to are the batches that come together: counted shapes `(rows, *item sizes)`. In the
model each shape runs in one kind of bucket, several times if it has more rows than the bucket; the
planner may mix kinds and so do better. The grid is not a rectangle: long items get short batches.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bucket import BATCH, Bucket, checked_axes
from .cost import CostModel
from .errors import FitError, TraceError
from .fit import fit_ladder
from .grid import Grid
from .ladder import Ladder
from .schemes import powers_of_two
from .select_buckets import select_buckets

# One axis may offer this many sizes, several axes together about as many shapes.
_SHAPES = 48

BucketNumber = Callable[[Bucket], float]


@dataclass(frozen=True, slots=True)
class GridFit:
    """A fitted grid, its bill, and how far it can be from the best.

    Args:
        grid: Covers every item up to the limits.
        seconds: Run seconds of the observed shapes.
        waste: 1 - real / computed elements of the observed shapes.
        lower_bound_s: No grid of the candidate buckets within the budgets runs them in less.
        compile_s: Seconds to compile all programs.
        bytes: Bytes of all programs.
    """

    grid: Grid
    seconds: float
    waste: float
    lower_bound_s: float
    compile_s: float
    bytes: float

    @property
    def gap(self) -> float:
        """The most that could still be saved: 1 - lower bound / seconds."""
        return 1 - self.lower_bound_s / self.seconds if self.seconds else 0.0


def fit_grid(
    shapes: Mapping[tuple[int, ...], float],
    axes: Sequence[str],
    cost: CostModel | BucketNumber,
    *,
    programs: int,
    limits: Mapping[str, int] | None = None,
    batch_rungs: Sequence[int] | None = None,
    compile_seconds: BucketNumber | None = None,
    budget_seconds: float = math.inf,
    program_bytes: BucketNumber | None = None,
    budget_bytes: float = math.inf,
    max_elements: int | None = None,
) -> GridFit:
    """A grid of few buckets that runs the observed batches in little time, and a bound on what is left.

    Args:
        shapes: Count of each observed batch `(rows, *item sizes)`.
        axes: `"batch"`, then the item axes.
        cost: Seconds of a bucket.
        programs: The most buckets.
        limits: The largest item on each item axis; by default the largest observed.
        batch_rungs: Batch sizes to consider; by default powers of two and the most rows observed.
        compile_seconds: Seconds to compile a bucket's program.
        budget_seconds: The most compile seconds together.
        program_bytes: Bytes of a bucket's program.
        budget_bytes: The most bytes together.
        max_elements: Larger buckets are not considered, except with the smallest batch.

    Raises:
        TraceError: if nothing was observed, or something that is no shape.
        FitError: if nothing meets the budgets, a shape is above the limits, or a number is NaN.
    """
    names = checked_axes(tuple(axes))
    sizes, counts = _checked_shapes(shapes, names)
    top = _checked_limits(sizes, names, limits)
    if programs < 1 or not (budget_seconds > 0 and budget_bytes > 0):
        raise FitError(
            f"A grid needs at least 1 program and budgets above 0; got {programs} programs, "
            f"{budget_seconds!r} seconds and {budget_bytes!r} bytes."
        )
    most = int(sizes[:, 0].max())
    batch = Ladder(tuple(sorted(batch_rungs))) if batch_rungs else powers_of_two().ladder(most)
    buckets = _candidates(sizes, counts, names, top, batch, max_elements)
    seconds = _evaluated(cost.seconds if isinstance(cost, CostModel) else cost, buckets, "cost")
    compiles = _evaluated(compile_seconds, buckets, "compile time")
    held = _evaluated(program_bytes, buckets, "number of bytes")
    boxes = np.array([bucket.sizes for bucket in buckets])
    runs = -(-sizes[:, :1] // boxes[:, 0])
    fits = (sizes[:, None, 1:] <= boxes[None, :, 1:]).all(axis=-1)
    serve = np.where(fits, counts[:, None] * runs * seconds, np.inf)
    cover = np.asarray((boxes[:, 1:] >= top).all(axis=1), np.bool_)
    spend = np.stack([np.ones(len(buckets)), compiles, held])
    found = select_buckets(serve, cover, spend, np.array([programs, budget_seconds, budget_bytes]))
    chosen = list(found.chosen)
    grid = Grid(names, [buckets[place] for place in chosen])
    grid.check_coverage(dict(zip(names[1:], top.tolist(), strict=True)))
    used = np.array(chosen)[serve[:, chosen].argmin(axis=1)]
    computed = counts * np.take_along_axis(runs, used[:, None], axis=1)[:, 0] * boxes[used].prod(axis=1)
    waste = 1 - float(counts @ sizes.prod(axis=1)) / float(computed.sum())
    return GridFit(
        grid, found.total, waste, found.bound, float(compiles[chosen].sum()), float(held[chosen].sum())
    )


def _checked_shapes(
    shapes: Mapping[tuple[int, ...], float], axes: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    for shape, count in shapes.items():
        if len(shape) != len(axes) or shape[0] < 1 or min(shape) < 0:
            raise TraceError(
                f"A shape has rows from 1 and one size from 0 for each of {axes[1:]}; got {shape}."
            )
        if not (0 <= count < math.inf):
            raise TraceError(f"A count is a finite number of at least 0; got {count!r} for {shape}.")
    counted = sorted((tuple(shape), float(count)) for shape, count in shapes.items() if count > 0)
    if not counted:
        raise TraceError("At least one observed shape is needed; the trace is empty.")
    return np.array([shape for shape, _ in counted], np.int64), np.array([count for _, count in counted])


def _checked_limits(
    sizes: NDArray[np.int64], axes: tuple[str, ...], limits: Mapping[str, int] | None
) -> NDArray[np.int64]:
    seen: NDArray[np.int64] = np.maximum(sizes[:, 1:].max(axis=0), 1)
    if limits is None:
        return seen
    if set(limits) - {BATCH} != set(axes[1:]):
        raise FitError(f"Limits are those of the item axes {axes[1:]}; got {dict(limits)}.")
    top = np.array([limits[axis] for axis in axes[1:]], np.int64)
    if (seen > top).any():
        raise FitError(f"Observed sizes are at most the limits {top.tolist()}; got {seen.tolist()}.")
    return top


def _candidates(
    sizes: NDArray[np.int64],
    counts: NDArray[np.float64],
    axes: tuple[str, ...],
    top: NDArray[np.int64],
    batch: Ladder,
    max_elements: int | None,
) -> list[Bucket]:
    """Every batch rung at every item shape on the axes' own best ladders."""
    each = max(2, int(_SHAPES ** (1 / max(1, len(top)))))
    ladders = [
        fit_ladder(_counted(sizes[:, place + 1], counts * sizes[:, 0]), each, limit=int(limit))
        for place, limit in enumerate(top)
    ]
    cap = math.inf if max_elements is None else max_elements
    return [
        Bucket(axes, (rows, *items))
        for items in itertools.product(*ladders)
        for rows in batch
        if rows * math.prod(items) <= cap or rows == batch.rungs[0]
    ]


def _counted(values: NDArray[np.int64], weights: NDArray[np.float64]) -> dict[int, float]:
    distinct, inverse = np.unique(values, return_inverse=True)
    return dict(zip(distinct.tolist(), np.bincount(inverse, weights=weights).tolist(), strict=True))


def _evaluated(function: BucketNumber | None, buckets: Sequence[Bucket], what: str) -> NDArray[np.float64]:
    if function is None:
        return np.zeros(len(buckets))
    values = [float(function(bucket)) for bucket in buckets]
    for bucket, value in zip(buckets, values, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise FitError(f"A {what} is a finite number of at least 0; got {value!r} for bucket {bucket}.")
    return np.array(values)
