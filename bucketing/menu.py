"""The menu: for each item size, the cheapest bucket for every number of rows.

Items that pad to the same rungs are interchangeable, so everything is kept by *cell*: the tuple of
rungs an item pads to. Menus are made when a cell is first met and dropped when the cost changes.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .bucket import Bucket
from .cost import CostModel
from .errors import CostError, DoesNotFit, PlanError
from .grid import Grid

Cell = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Menu:
    """The choices for runs whose largest item lies in one cell.

    Args:
        seconds: `seconds[r]` is the least cost of a run of r rows, for r from 1 to the most rows one
            bucket takes; `seconds[0]` is 0.
        buckets: `buckets[r]` is the bucket with that cost, on a tie the one with fewest elements.
        options: `(rows, seconds)` of the runs worth considering, most rows first; an option that has
            no more rows than another and costs no less is left out.
    """

    seconds: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    options: tuple[tuple[int, float], ...]

    @property
    def max_rows(self) -> int:
        """The most rows one run takes."""
        return len(self.seconds) - 1


class Menus:
    """All menus of a grid under a cost, kept in step with the cost model.

    Args:
        grid: The buckets there are.
        cost: A `CostModel`, or a function from bucket to seconds that is read once.
    """

    def __init__(self, grid: Grid, cost: CostModel | Callable[[Bucket], float]) -> None:
        self.grid = grid
        self._model = cost if isinstance(cost, CostModel) else None
        self._fixed = [] if isinstance(cost, CostModel) else [float(cost(bucket)) for bucket in grid.buckets]
        self._rungs = tuple(grid.rungs(axis) for axis in grid.item_axes)
        self._only = self._rungs[0] if len(self._rungs) == 1 else None
        self.slowest_s = 0.0
        self._line = tuple((rung,) for rung in self._only or ())
        self._menus: dict[Cell, Menu | None] = {}
        self._joins: dict[tuple[Cell, Cell], tuple[Cell, Menu | None]] = {}
        self._costs: list[tuple[float, Bucket]] = []
        self._version: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Drop the menus if the cost model learned something since they were made."""
        version = -1 if self._model is None else self._model.version
        if version == self._version:
            return
        costs = self._fixed if self._model is None else self._model.table(self.grid).tolist()
        for bucket, seconds in zip(self.grid.buckets, costs, strict=True):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise CostError(
                    f"A plan needs finite costs of at least 0; got {seconds!r} for bucket {bucket}."
                )
        pairs = zip(costs, self.grid.buckets, strict=True)
        self.slowest_s = max(costs)
        self._costs = sorted(pairs, key=lambda pair: (pair[0], pair[1].elements, pair[1].sizes))
        self._menus = {}
        self._joins = {}
        self._version = version

    def cells(self, sizes: Sequence[Sequence[int]]) -> list[Cell]:
        """The cell of each item.

        Raises:
            DoesNotFit: if an item is larger than every bucket.
            PlanError: if an item has the wrong number of sizes.
        """
        try:
            if self._only is not None:
                rungs, cells = self._only, self._line
                return [cells[bisect_left(rungs, size)] for (size,) in sizes]
            return [
                tuple(rungs[bisect_left(rungs, size)] for rungs, size in zip(self._rungs, item, strict=True))
                for item in sizes
            ]
        except IndexError:
            place, item = next((p, i) for p, i in enumerate(sizes) if not self.grid.candidates(1, tuple(i)))
            raise self._too_large(tuple(item), f"row {place} of") from None
        except (TypeError, ValueError):
            axes = self.grid.item_axes
            raise PlanError(f"Each waiting row needs one integer for each of the axes {axes}.") from None

    def menu(self, cell: Cell) -> Menu:
        """The menu of a cell.

        Raises:
            DoesNotFit: if no bucket holds an item of this size.
        """
        menu = self.find(cell)
        if menu is None:
            raise self._too_large(cell, "one that pads to")
        return menu

    def find(self, cell: Cell) -> Menu | None:
        """The menu of a cell, or None if no bucket holds it."""
        try:
            return self._menus[cell]
        except KeyError:
            menu = self._menus[cell] = self._made(cell)
            return menu

    def join(self, one: Cell, other: Cell) -> tuple[Cell, Menu | None]:
        """The cell that holds items of both cells, and its menu if a bucket holds it."""
        try:
            return self._joins[one, other]
        except KeyError:
            cell = tuple(map(max, one, other))
            joined = self._joins[one, other] = (one if cell == one else cell), self.find(cell)
            return joined

    def _made(self, cell: Cell) -> Menu | None:
        seconds: list[float] = [0.0]
        buckets: list[Bucket] = []
        options: list[tuple[int, float]] = []
        for cost, bucket in self._costs:
            more = bucket.rows - len(buckets)
            if more > 0 and bucket.holds(1, cell):
                seconds += [cost] * more
                buckets += [bucket] * more
                if options and options[-1][1] == cost:
                    options.pop()
                options.append((bucket.rows, cost))
        if not buckets:
            return None
        return Menu(tuple(seconds), (buckets[0], *buckets), tuple(reversed(options)))

    def _too_large(self, item: Cell, which: str) -> DoesNotFit:
        return DoesNotFit(
            f"A waiting row must fit a bucket; {which} size {'x'.join(map(str, item))} fits none, the "
            f"nearest is {self.grid.nearest(1, item)}. Refuse it at the door, or cut it."
        )
