"""Which waiting rows run together, and in which bucket: the cheapest, never the first that fits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bucket import Bucket
from .cost import CostModel
from .errors import PlanError
from .grid import Grid
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
    oldest rows of equal size go first.

    Args:
        grid: The buckets that may run.
        cost: A `CostModel`, followed as it learns, or a function that is read once.
        window: How many of the oldest rows one call of `next_run` looks at; the time of a call is
            bounded by it, whatever waits behind.

    Raises:
        CostError: if a bucket's cost is NaN, infinite or negative.
        PlanError: if `window` is below 1.
    """

    def __init__(self, grid: Grid, cost: CostModel | Callable[[Bucket], float], window: int = 256) -> None:
        if window < 1:
            raise PlanError(f"A planner's window is at least 1 row; got {window}.")
        self.grid = grid
        self.window = window
        self._menus = Menus(grid, cost)
        self._several = len(grid.item_axes) > 1

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
        order, lengths = self._cut(cells, lateness)
        place = 0
        for rows in lengths:
            chosen = order[place : place + rows]
            if first in chosen:
                break
            place += rows
        return self._run(cells, chosen)

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
        order, lengths = self._cut(cells, lateness)
        runs: list[Run] = []
        place = 0
        for rows in lengths:
            runs.append(self._run(cells, order[place : place + rows]))
            place += rows
        return sorted(runs, key=lambda run: run.rows[0])

    def _cells(self, sizes: Sizes) -> list[Cell]:
        if isinstance(sizes, np.ndarray):
            if sizes.ndim != 2 or sizes.dtype.kind not in "iu":
                raise PlanError(
                    f"Waiting sizes are integers of shape (rows, item axes); got {sizes.dtype} {sizes.shape}."
                )
            return self._menus.cells(sizes.tolist())
        return self._menus.cells(sizes)

    def _cut(self, cells: list[Cell], lateness: Lateness | None) -> tuple[list[int], list[int]]:
        """An order of the rows and the lengths of the runs it is cut into."""
        count = len(cells)
        if lateness is not None and len(lateness.slack_s) < count:
            raise PlanError(f"Each of the {count} rows needs a slack; got {len(lateness.slack_s)}.")
        slack = None if lateness is None else [float(s) for s in lateness.slack_s[:count]]
        if slack is not None and any(map(math.isnan, slack)):
            raise PlanError("A slack is a number of seconds, or inf where there is no deadline; got NaN.")
        if slack is not None and min(slack) >= self._menus.slowest_s:
            slack = None
        if slack is None and not self._several:
            # Stable and reversed: largest first, and rows of one cell stay in order of arrival.
            order = sorted(range(count), key=cells.__getitem__, reverse=True)
            return order, filled_runs([cells[row] for row in order], self._menus)
        best: tuple[float, list[int], list[int]] | None = None
        for order in self._orders(cells, slack):
            sorted_slack = None if slack is None else [slack[row] for row in order]
            price = 1.0 if lateness is None else lateness.price
            lengths, total = joined_runs([cells[row] for row in order], self._menus, sorted_slack, price)
            if best is None or total < best[0]:
                best = total, order, lengths
        if best is None:
            raise PlanError("Nothing waits.")
        return best[1], best[2]

    def _orders(self, cells: list[Cell], slack: list[float] | None) -> list[list[int]]:
        axes = len(self.grid.item_axes)
        urgent = [0.0] * len(cells) if slack is None else [-left for left in slack]
        area = {cell: float(np.prod(cell)) for cell in set(cells)}
        leads: list[Callable[[Cell], float]] = [area.__getitem__]
        if axes > 1 and len(cells) <= _FEW:
            leads += [lambda cell, axis=axis: cell[axis] for axis in range(axes)]  # type: ignore[misc]
        return [
            sorted(range(len(cells)), key=lambda i: (lead(cells[i]), cells[i], urgent[i]), reverse=True)
            for lead in leads
        ]

    def _run(self, cells: list[Cell], chosen: list[int]) -> Run:
        cell = cells[chosen[0]]
        if self._several:
            cell = tuple(map(max, *(cells[row] for row in chosen))) if len(chosen) > 1 else cell
        return Run(self._menus.menu(cell).buckets[len(chosen)], tuple(sorted(chosen)))


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
