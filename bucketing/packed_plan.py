"""Which waiting items are packed together, and into which bucket.

In the packed layout a bucket of R rows and C columns holds whatever best-fit packing gets into R rows of C
(`servax.bucketing.packing`), not just R items.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bucket import Bucket
from .cost import CostModel
from .errors import DoesNotFit, GridError, PlanError
from .grid import Grid
from .packed_row import fill_row
from .packed_whole import packed_runs
from .packing import Bins, Packing, checked_lengths
from .plan import Lateness, Planner, Run, Sizes, Whole

_FULL = 0.9
# A row so full is not filled better at the price of passing older items over; of so many is it chosen. From
# 0.95 to 1 a device full of texts gains 1.3 % and their 99th percentile loses 5 %.
_ENOUGH = 0.97
_CHOICE = 32
# What a run costs more that passes over all who are due; 0 gains 0.5 %, and the 99th percentile loses 15 %.
_OVERTAKEN = 0.2
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


def packed_grid(limit: int, *, elements: int = 1024, smallest: int = 16, axis: str = "length") -> Grid:
    """Buckets for packed rows: few, since rows are filled whatever comes.

    One row of four widths to each doubling (8 apart at the least) for what comes alone and cannot be packed.
    From 64 columns on also several rows, up to `elements`, of the powers of two and the widths halfway
    between, since attention costs by the width of the row. On two CPU cores 1,024 tokens at once are 5 %
    faster than 512. Two rows of 64 are left out: one of 128 costs as much, and is filled better.

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
            if rows * width > min(limit, 2 * _SHARED):
                sizes.append((rows, width))
            rows *= 2
    return Grid.explicit(("batch", axis), sizes)


class PackedPlanner(Planner):
    """Plans packed runs: the bucket of least cost for each real element, filled with the oldest items.

    Widths of rows are tried in the order of what they promise, until no other can be better; where more waits
    than one run holds, those too narrow for items whose turn it is count as somewhat dearer. Row after row
    gets the oldest item that is left and those behind it that fill it (`fill_row`); the rows of a run are in
    that order, in which best fit packs them again: a row of the plan opens at most one row there.

    Args:
        grid: The buckets that may run, over batch and one more axis.
        cost: A `CostModel`, followed as it learns, or a function that is read once.
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
        self._cost = cost if isinstance(cost, CostModel) else None
        self._max_segments = max_segments
        self._largest = max(bucket.elements for bucket in grid.buckets)
        self._places = {bucket: place for place, bucket in enumerate(grid.buckets)}
        self._columns = grid.rungs(grid.item_axes[0])
        self._by_columns = {
            size: [(place, one) for place, one in enumerate(grid.buckets) if one.item_sizes[0] == size]
            for size in self._columns
        }
        once = [] if isinstance(cost, CostModel) else [float(cost(bucket)) for bucket in grid.buckets]
        self._known = _Costs(None, once, {})

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
        lengths = [int(size[0]) for size in sizes[: self.window]]
        seconds, total = self._costs().seconds, sum(lengths)
        line = [first, *[place for place in range(count) if place != first]]
        due = self._due(lengths, line) if total > self._largest else []
        best, best_rate, chosen = None, math.inf, list[list[int]]()
        for promise, columns in self._promises(lengths[first], total):
            if promise >= best_rate:
                break
            rows, held = self._rows(lengths, line, columns)
            overtaken = sum([length for length in due if length > columns])
            price = 1 + _OVERTAKEN * overtaken / self._largest
            for place, bucket in self._by_columns[columns]:
                rate = price * seconds[place] / held[min(bucket.rows, len(rows))]
                if rate < best_rate:
                    best, best_rate, chosen = bucket, rate, rows[: bucket.rows]
        if best is None:
            raise self._too_long(lengths[first])
        return Run(best, tuple([place for row in chosen for place in row]))

    def _due(self, lengths: Sequence[int], line: Sequence[int]) -> list[int]:
        """Lengths of the oldest, as many as the largest bucket has elements for."""
        due, left = [], self._largest
        for place in line:
            left -= lengths[place]
            if left < 0:
                break
            due.append(lengths[place])
        return due

    def _promises(self, longest: int, total: int) -> list[tuple[float, int]]:
        """Widths of rows, each behind the least cost of an element that it may reach; the best first."""
        seconds, found = self._costs().seconds, list[tuple[float, int]]()
        for columns in self._columns[bisect_left(self._columns, longest) :]:
            pairs = self._by_columns[columns]
            found.append((min([seconds[place] / min(one.elements, total) for place, one in pairs]), columns))
        return sorted(found)

    def _rows(
        self, lengths: Sequence[int], line: Sequence[int], columns: int
    ) -> tuple[list[list[int]], list[int]]:
        """Rows of a width, at most as many as a bucket takes, and the elements in so many of them, from 0."""
        line = [place for place in line if lengths[place] <= columns]
        rows, held, enough = list[list[int]](), [0], math.ceil(_ENOUGH * columns)
        choice = max(_CHOICE, 2 * self._max_segments)
        while line and len(rows) < self._by_columns[columns][-1][1].rows:
            row = fill_row(lengths, line[:choice], columns, self._max_segments, enough)
            rows.append(row)
            held.append(held[-1] + sum([lengths[place] for place in row]))
            gone = set(row)
            line = [place for place in line if place not in gone]
        return rows, held

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
        order = np.argsort(-np.array(lengths, np.int64), kind="stable").tolist()
        by_length = [
            Run(run.bucket, tuple([order[place] for place in run.rows]))
            for run in self.plan([sizes[place] for place in order])
        ]
        return Whole(min(found.runs, by_length, self.plan(sizes), key=self._sum), [])

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
        known, columns = self._costs(), bisect_left(self._columns, length)
        if columns == len(self._columns):
            raise self._too_long(length)
        if columns not in known.alone:
            wide = [pair for size in self._columns[columns:] for pair in self._by_columns[size]]
            _, known.alone[columns] = min(wide, key=lambda pair: known.seconds[pair[0]])
        return known.alone[columns]

    def _costs(self) -> "_Costs":
        """Seconds of the buckets, as they are known now."""
        known = self._known
        if self._cost is not None and (table := self._cost.table(self.grid)) is not known.table:
            known = self._known = _Costs(table, table.tolist(), {})
        return known

    def _seconds_of(self, bucket: Bucket) -> float:
        return self._costs().seconds[self._places[bucket]]

    def _too_long(self, length: int) -> DoesNotFit:
        return DoesNotFit(
            f"An item must fit into a row; {length} is longer than the longest, {self._columns[-1]}. "
            f"Cut it or raise the limit."
        )


class _Costs(NamedTuple):
    """Seconds of each bucket of a grid, the array that they were read from, and what was found by them."""

    table: NDArray[np.float64] | None
    seconds: list[float]
    alone: dict[int, Bucket]
