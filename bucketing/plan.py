"""Which waiting rows run together, and in which bucket: the cheapest, never the first that fits."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bucket import Bucket
from .cost import CostModel
from .errors import PlanError
from .grid import Grid
from .launch import first_launched, launched
from .menu import Cell, Menus
from .partition import filled_runs, joined_runs

# With several axes more orders than one are tried, as long as the list is this short.
_FEW = 64

Sizes = NDArray[np.integer] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One launched batch: a bucket, and the waiting rows it takes in order of arrival.

    Args:
        bucket: The bucket to pad to.
        rows: Rising places in the waiting list, at most `bucket.rows` of them.
    """

    bucket: Bucket
    rows: tuple[int, ...]


class Whole(NamedTuple):
    """A plan of all that is known.

    Args:
        runs: The runs to launch, in this order.
        left: Rising places of the rows that had better wait for those to come.
    """

    runs: list[Run]
    left: list[int]


@dataclass(frozen=True, slots=True)
class Lateness:
    """Deadlines of the waiting rows, as something a plan may pay for.

    Args:
        slack_s: Seconds each waiting row has left, one a row; `inf` where there is no deadline.
        price: Seconds of compute that one second of lateness of one row is worth.
    """

    slack_s: Sequence[float]
    price: float = 1.0


class Planner:
    """Plans runs from a waiting list, oldest row first in the list.

    With no or one item axis a plan is the exact minimum of the summed cost (`filled_runs`), with
    several axes the best cut of a few sorted orders (`joined_runs`), which is a heuristic. The
    oldest rows of equal size go first. Draining 10,000 rows through a window of 256 costs 0.1 % more
    than the plan of all of them at once, through 64 rows 1 to 2 %.

    Args:
        grid: The buckets that may run.
        cost: A `CostModel`, followed as it learns, or a function that is read once.
        window: How many of the oldest rows one call of `next_run` looks at; the time of a call is
            bounded by it, whatever waits behind.

    Raises:
        CostError: if a bucket's cost is NaN, infinite or negative.
        PlanError: if `window` is below 1.
    """

    exchanges = True
    """Whether rows that pad to the same sizes may take each other's place in a run."""

    def __init__(self, grid: Grid, cost: CostModel | Callable[[Bucket], float], window: int = 256) -> None:
        if window < 1:
            raise PlanError(f"A planner's window is at least 1 row; got {window}.")
        self.grid = grid
        self.window = window
        self._menus = Menus(grid, cost)
        self._several = len(grid.item_axes) > 1

    def with_cost(self, cost: CostModel | Callable[[Bucket], float]) -> "Planner":
        """The same planner by other costs."""
        return Planner(self.grid, cost, self.window)

    def full(self, bucket: Bucket, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether no more rows get into a run of these."""
        return len(sizes) == bucket.rows

    def most_rows(self, bucket: Bucket, sizes: Sequence[int]) -> int:
        """How many rows of this size a run takes at most."""
        return bucket.rows

    def smallest(self, sizes: Sequence[Sequence[int]]) -> Bucket:
        """The bucket of fewest elements that holds all these rows.

        Raises:
            DoesNotFit: if there is none.
        """
        return self.grid.smallest(len(sizes), tuple(map(max, zip(*sizes, strict=True))))

    def next_run(self, sizes: Sizes, *, first: int = 0, lateness: Lateness | None = None) -> Run:
        """The run to launch now: the one that holds row `first` in the plan of the window.

        Since row 0 is the oldest, it is part of every next run, so a row is passed over at most as
        often as there were rows ahead of it when it came.

        Args:
            sizes: `(rows, item axes)` integers, or a sequence of tuples; oldest first.
            first: A row of the window that the run must hold.
            lateness: Deadlines, at least one for each row of the window.

        Raises:
            DoesNotFit: if a row of the window is larger than every bucket.
            PlanError: if nothing waits or `first` lies outside the window.
        """
        self._menus.refresh()
        count = min(len(sizes), self.window)
        if not 0 <= first < count:
            raise PlanError(f"The run must hold one of the {count} rows in the window; got row {first}.")
        cells = self._cells(sizes[: self.window])
        if count == 1:
            return Run(self._menus.menu(cells[0]).buckets[1], (0,))
        slack = self._slack(lateness, count)
        segments = self._cut(cells, slack, 1.0 if lateness is None else lateness.price)
        if slack is None:
            return self._run(cells, first_launched(segments, cells, first, self._fullness(cells)))
        return self._run(cells, next(segment for segment in segments if first in segment))

    def plan(self, sizes: Sizes, *, lateness: Lateness | None = None) -> list[Run]:
        """All waiting rows as runs, each row in exactly one, ordered by their oldest row.

        Args:
            sizes: `(rows, item axes)` integers, or a sequence of tuples; oldest first.
            lateness: Deadlines, one for each row.

        Raises:
            DoesNotFit: if a row is larger than every bucket.
        """
        self._menus.refresh()
        cells = self._cells(sizes)
        if not cells:
            return []
        slack = self._slack(lateness, len(cells))
        segments = self._cut(cells, slack, 1.0 if lateness is None else lateness.price)
        if slack is None:
            segments = launched(segments, cells, self._fullness(cells))
        return [self._run(cells, segment) for segment in sorted(segments, key=min)]

    def whole(self, sizes: Sizes, *, more: bool = False, untried: Collection[Bucket] = ()) -> Whole:
        """A plan of rows that are all known, none of which is more urgent than another.

        Args:
            sizes: as for `plan`.
            more: whether others will come, for which the rows of runs that are not full may wait.
            untried: buckets whose cost is not sure; a packed plan runs each once that may be the best.

        Raises:
            DoesNotFit: if a row is larger than every bucket.
        """
        runs = self.plan(sizes)
        if not more:
            return Whole(runs, [])
        full = [run for run in runs if self.full(run.bucket, [sizes[row] for row in run.rows])]
        taken = {row for run in full for row in run.rows}
        return Whole(full, [row for row in range(len(sizes)) if row not in taken])

    def _cells(self, sizes: Sizes) -> list[Cell]:
        if isinstance(sizes, np.ndarray):
            if sizes.ndim != 2 or sizes.dtype.kind not in "iu":
                raise PlanError(
                    f"Waiting sizes are integers of shape (rows, item axes); got {sizes.dtype} {sizes.shape}."
                )
            return self._menus.cells(sizes.tolist())
        return self._menus.cells(sizes)

    def _slack(self, lateness: Lateness | None, count: int) -> list[float] | None:
        """The slack of each row, or None if no single run can make any of them late."""
        if lateness is None:
            return None
        if len(lateness.slack_s) < count:
            raise PlanError(f"Each of the {count} rows needs a slack; got {len(lateness.slack_s)}.")
        slack = [float(seconds) for seconds in lateness.slack_s[:count]]
        if any(map(math.isnan, slack)):
            raise PlanError("A slack is a number of seconds, or inf where there is no deadline; got NaN.")
        return slack if min(slack) < self._menus.slowest_s else None

    def _cut(self, cells: list[Cell], slack: list[float] | None, price: float) -> list[list[int]]:
        """The rows of each run of the cheapest cut found."""
        count = len(cells)
        if slack is None and not self._several:
            # Stable and reversed: largest first, and rows of one cell stay in order of arrival.
            order = sorted(range(count), key=cells.__getitem__, reverse=True)
            return _sliced(order, filled_runs([cells[row] for row in order], self._menus))
        best: tuple[float, list[list[int]]] = float("inf"), []
        for order in self._orders(cells, slack):
            urgency = None if slack is None else [slack[row] for row in order]
            lengths, total = joined_runs([cells[row] for row in order], self._menus, urgency, price)
            if not best[1] or total < best[0]:
                best = total, _sliced(order, lengths)
        return best[1]

    def _orders(self, cells: list[Cell], slack: list[float] | None) -> list[list[int]]:
        axes = len(self.grid.item_axes)
        urgent = [0.0] * len(cells) if slack is None else [-left for left in slack]
        area = {cell: math.prod(cell) for cell in set(cells)}
        leads: list[Callable[[Cell], int]] = [area.__getitem__]
        if axes > 1 and len(cells) <= _FEW:
            leads += [lambda cell, axis=axis: cell[axis] for axis in range(axes)]  # type: ignore[misc]
        return [
            sorted(range(len(cells)), key=lambda i: (lead(cells[i]), cells[i], urgent[i]), reverse=True)
            for lead in leads
        ]

    def _bucket(self, cells: list[Cell], rows: Sequence[int]) -> Bucket:
        mine = [cells[row] for row in rows]
        cell = tuple(map(max, zip(*mine, strict=True))) if self._several else max(mine)
        return self._menus.menu(cell).buckets[len(rows)]

    def _run(self, cells: list[Cell], rows: Sequence[int]) -> Run:
        return Run(self._bucket(cells, rows), tuple(sorted(rows)))

    def _fullness(self, cells: list[Cell]) -> Callable[[Sequence[int]], float]:
        def fullness(rows: Sequence[int]) -> float:
            return sum(math.prod(cells[row]) for row in rows) / self._bucket(cells, rows).elements

        return fullness


def _sliced(order: list[int], lengths: list[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(lengths))
    return [order[end - rows : end] for rows, end in zip(lengths, ends, strict=True)]


def plan(
    sizes: ArrayLike,
    grid: Grid,
    cost: CostModel | Callable[[Bucket], float],
    *,
    lateness: Lateness | None = None,
) -> list[Run]:
    """All waiting rows as runs of least total cost; see `Planner.plan`.

    Args:
        sizes: `(rows, item axes)` integers, oldest first.
        grid: The buckets that may run.
        cost: Seconds of each bucket.
        lateness: Deadlines, one for each row.

    Raises:
        DoesNotFit: if a row is larger than every bucket.
        PlanError: if `sizes` has another shape or dtype, or holds a negative size.
        CostError: if a bucket's cost is NaN, infinite or negative.
    """
    waiting = np.asarray(sizes)
    if waiting.size == 0 and waiting.ndim < 2:
        waiting = np.zeros((0, len(grid.item_axes)), np.int64)
    if waiting.ndim == 2 and waiting.size and waiting.min() < 0:
        raise PlanError(f"Waiting sizes are at least 0; got {waiting.min()}.")
    return Planner(grid, cost).plan(waiting, lateness=lateness)
