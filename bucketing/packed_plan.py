"""Which waiting items are packed together, and into which bucket.

In the packed layout a bucket of R rows and C columns holds whatever best-fit packing gets into R rows of C
(`servax.bucketing.packing`), not just R items.
"""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from .bucket import Bucket
from .cost import CostModel
from .errors import DoesNotFit, GridError, PlanError
from .grid import Grid
from .packed_whole import packed_runs
from .packing import Bins, Packing, checked_lengths
from .plan import Lateness, Planner, Run, Sizes, Whole

# Best fit leaves 2 to 5 % of a row free when there is enough to choose from (experiments, compare_schemes).
_FILL = 0.95
_FULL = 0.9
# Narrower rows hold too few items to be filled well.
_SHARED = 64


def pack_into(lengths: Sequence[int], bucket: Bucket, max_segments: int) -> tuple[Packing, list[int]]:
    """Best fit into one bucket, in the given order; what does not get in is passed over.

    Leaving those out changes nothing for the others, so what a plan found to fit fits again.

    Args:
        lengths: of the items.
        bucket: over batch and one more axis.
        max_segments: most items in one row.

    Returns:
        The packing of those that got in, and their places in `lengths`, rising.

    Raises:
        PackingError: if an item is longer than a row.
    """
    rows, capacity = bucket.sizes
    sizes = checked_lengths(lengths, capacity)
    bins = Bins(capacity, max_segments, rows)
    kept = [place for place, size in enumerate(sizes.tolist()) if bins.place(place, size)]
    if len(kept) == len(sizes):
        return bins.packing(sizes), kept
    return bins.kept(kept, sizes[kept]), kept


def pack_all(lengths: Sequence[int], bucket: Bucket, max_segments: int) -> Packing | None:
    """All items into one bucket, in the given order or, if that fails, the longest first; None if neither."""
    packing, kept = pack_into(lengths, bucket, max_segments)
    if len(kept) == len(lengths):
        return packing
    order = np.argsort(-np.asarray(lengths), kind="stable")
    packing, kept = pack_into([lengths[place] for place in order], bucket, max_segments)
    if len(kept) < len(lengths):
        return None
    back = np.argsort(order)
    columns = (packing.lengths, packing.row, packing.start, packing.segment)
    return Packing(packing.capacity, *(column[back] for column in columns))


def packed_grid(limit: int, *, elements: int = 512, smallest: int = 16, axis: str = "length") -> Grid:
    """Buckets for packed rows: few, since rows are filled whatever comes.

    One row of four widths to each doubling (8 apart at the least) for what comes alone and cannot be packed.
    From 64 columns on also several rows, up to `elements`, of the powers of two and the widths halfway
    between, since attention costs by the width of the row. On two CPU cores 512 tokens run as fast as more
    (experiments, layouts).

    Args:
        limit: Longest item; the widest row.
        elements: Most elements of a bucket with several rows.
        smallest: Narrowest row.
        axis: Name of the axis.

    Raises:
        GridError: if a bound is below 1.
    """
    if min(limit, elements, smallest) < 1:
        raise GridError(f"Sizes are at least 1; got {limit}, {elements} and {smallest}.")
    lone, shared = {limit}, {limit}
    width = smallest
    while width < limit:
        lone |= set(range(width, min(2 * width, limit), max(8, width // 4)))
        shared |= {width, *([width + width // 2] if width >= 2 * _SHARED else [])}
        width *= 2
    sizes = [(1, width) for width in lone]
    for width in shared:
        rows = 2
        while _SHARED <= width <= limit and rows * width <= elements:
            sizes.append((rows, width))
            rows *= 2
    return Grid.explicit(("batch", axis), sizes)


class PackedPlanner(Planner):
    """Plans packed runs: the bucket of least cost for each real element, filled with the oldest items.

    A greedy heuristic: one bucket is chosen by what waits and what each costs, then packed once: the oldest
    item, then the oldest that fill the bucket by their sum, then the others into the gaps, each of these the
    longest first. The rows of a run are in that order.

    Args:
        grid: The buckets that may run, over batch and one more axis.
        cost: See `Planner`.
        window: See `Planner`.
        max_segments: Most items in one row.

    Raises:
        PlanError: if the grid has not exactly one axis beside batch, or a bound is below 1.
    """

    exchanges = False

    def __init__(
        self,
        grid: Grid,
        cost: CostModel | Callable[[Bucket], float],
        window: int = 256,
        *,
        max_segments: int,
    ) -> None:
        super().__init__(grid, cost, window)
        if len(grid.item_axes) != 1 or max_segments < 1:
            raise PlanError(
                f"Packing needs one axis beside batch and at least 1 segment a row; got {grid.axes} and "
                f"{max_segments}."
            )
        self._cost = cost
        self._max_segments = max_segments
        self._known, self._best = -1, dict[int, Bucket]()
        self._places = {bucket: place for place, bucket in enumerate(grid.buckets)}
        self._columns = np.array(grid.rungs(grid.item_axes[0]))
        self._by_columns = {
            size: [bucket for bucket in grid.buckets if bucket.item_sizes[0] == size]
            for size in self._columns.tolist()
        }

    def with_cost(self, cost: CostModel | Callable[[Bucket], float]) -> "PackedPlanner":
        """The same planner by other costs."""
        return PackedPlanner(self.grid, cost, self.window, max_segments=self._max_segments)

    def next_run(self, sizes: Sizes, *, first: int = 0, lateness: Lateness | None = None) -> Run:
        """The run to launch now; see `Planner.next_run`. Deadlines do not change it."""
        count = min(len(sizes), self.window)
        if not 0 <= first < count:
            raise PlanError(f"The run must hold one of the {count} rows in the window; got row {first}.")
        if count == 1:
            return Run(self._alone(int(sizes[0][0])), (0,))
        lengths = np.asarray(sizes[: self.window], np.int64).reshape(count, 1)[:, 0]
        waiting = np.concatenate([[first], np.delete(np.arange(count), first)])
        bucket = self._bucket_for(lengths[waiting])
        waiting = waiting[lengths[waiting] <= bucket.item_sizes[0]]
        sums = np.cumsum(lengths[waiting])
        oldest = max(1, int(np.searchsorted(sums, bucket.elements, side="right")))
        # More than fill it twice over only cost time: those are enough to choose from.
        most = min(int(np.searchsorted(sums, 2 * bucket.elements)) + 1, bucket.rows * self._max_segments)
        order = np.concatenate(
            [
                waiting[:1],
                _longest_first(lengths, waiting[1:oldest]),
                _longest_first(lengths, waiting[oldest:most]),
            ]
        )
        _, kept = pack_into(lengths[order].tolist(), bucket, self._max_segments)
        return Run(bucket, tuple(order[kept].tolist()))

    def plan(self, sizes: Sizes, *, lateness: Lateness | None = None) -> list[Run]:
        """All waiting items as runs, in the order of their launch; see `Planner.plan`."""
        left = list(range(len(sizes)))
        table = np.asarray(sizes, np.int64).reshape(len(left), 1) if left else np.zeros((0, 1), np.int64)
        runs = []
        while left:  # each turn takes at least the first
            run = self.next_run(table[left])
            taken = set(run.rows)
            runs.append(Run(run.bucket, tuple(left[place] for place in run.rows)))
            left = [row for place, row in enumerate(left) if place not in taken]
        return runs

    def whole(self, sizes: Sizes, *, more: bool = False, untried: Collection[Bucket] = ()) -> Whole:
        """All items as runs, if none is more urgent than another; see `Planner.whole`."""
        lengths = [int(size[0]) for size in sizes]
        found = packed_runs(
            lengths, self.grid, self._seconds_of, self._max_segments, more=more, untried=untried
        )
        if more or len(lengths) > self.window:
            return found
        # Few items fill few rows, and those of several widths no bucket.
        usual = self.plan(sizes)
        return found if self._sum(found.runs) <= self._sum(usual) else Whole(usual, [])

    def _sum(self, runs: Sequence[Run]) -> float:
        return sum(self._seconds_of(run.bucket) for run in runs)

    def full(self, bucket: Bucket, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether waiting could hardly fill the run better."""
        return sum(size[0] for size in sizes) >= _FULL * bucket.elements

    def most_rows(self, bucket: Bucket, sizes: Sequence[int]) -> int:
        """How many items of this size a run takes at most."""
        return bucket.rows * min(self._max_segments, bucket.item_sizes[0] // sizes[0])

    def smallest(self, sizes: Sequence[Sequence[int]]) -> Bucket:
        """The bucket of fewest elements that all the items can be packed into.

        Raises:
            DoesNotFit: if there is none.
        """
        lengths = [size[0] for size in sizes]
        longest, total = max(lengths), sum(lengths)
        for bucket in sorted(self.grid.buckets, key=lambda one: (one.elements, one.sizes)):
            if bucket.item_sizes[0] < longest or bucket.elements < total:
                continue
            if pack_all(lengths, bucket, self._max_segments) is not None:
                return bucket
        raise DoesNotFit(
            f"Items of a run must be packed into one bucket; {len(lengths)} of {total} elements fit none of "
            f"{len(self.grid)}. Run fewer together."
        )

    def _alone(self, length: int) -> Bucket:
        """The cheapest bucket for one item; remembered, since at low load every item comes alone."""
        version = self._cost.version if isinstance(self._cost, CostModel) else 0
        if self._known != version:
            self._known, self._best = version, {}
        columns = int(np.searchsorted(self._columns, length))
        if columns not in self._best:
            self._best[columns] = self._bucket_for(np.array([length]))
        return self._best[columns]

    def _bucket_for(self, lengths: NDArray[np.int64]) -> Bucket:
        """The bucket of least cost for each element that it would hold; the first item must fit."""
        best, best_rate = None, math.inf
        for columns in self._columns[np.searchsorted(self._columns, lengths[0]) :].tolist():
            sums = np.cumsum(lengths[lengths <= columns])
            for bucket in self._by_columns[columns]:
                # Of very short items it takes as many as it has segments, however many columns are left.
                most = int(sums[min(len(sums), bucket.rows * self._max_segments) - 1])
                held = min(most, max(int(_FILL * bucket.elements), int(lengths[0])))
                rate = self._seconds_of(bucket) / held
                if rate < best_rate:
                    best, best_rate = bucket, rate
        if best is None:
            raise DoesNotFit(
                f"An item must fit into a row; {int(lengths[0])} is longer than the longest, "
                f"{int(self._columns[-1])}. Cut it or raise the limit."
            )
        return best

    def _seconds_of(self, bucket: Bucket) -> float:
        cost = self._cost
        if isinstance(cost, CostModel):
            return float(cost.table(self.grid)[self._places[bucket]])
        return cost(bucket)


def _longest_first(lengths: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    return places[np.argsort(-lengths[places], kind="stable")]
