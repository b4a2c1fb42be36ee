"""Cutting a sorted waiting list into runs of least total cost.

Both functions take the rows already in the order in which they may be cut, largest items first, and
return how many rows each run takes.
"""

from collections.abc import Sequence

from .menu import Cell, Menus

# Equal sums reach us in different orders of addition; a later option must win by more than that.
_CLEARLY = 1 - 1e-12


def filled_runs(cells: Sequence[Cell], menus: Menus) -> list[int]:
    """The exact minimum where items are compared on at most one axis.

    The largest waiting item decides its run's length, and the rows left over in the bucket cost
    nothing when the next smaller items fill them; fewer rows waiting never cost more. So every run
    takes as many rows as its bucket has, and
    T[i] = min over buckets (rows b, cost c) that hold item i of c + T[min(i + b, n)].
    On ties the run with more rows goes first.

    Args:
        cells: Non-increasing.
        menus: Where a cell's options are found.

    Returns:
        The lengths of the runs from the front; they add up to `len(cells)`.
    """
    count = len(cells)
    least = [0.0] * (count + menus.grid.max_rows)
    taken = [0] * count
    before: Cell | None = None
    options: tuple[tuple[int, float], ...] = ()
    for place in range(count - 1, -1, -1):
        cell = cells[place]
        if cell != before:
            options, before = menus.menu(cell).options, cell
        best, bar = float("inf"), float("inf")
        for rows, seconds in options:
            total = seconds + least[place + rows]
            if total < bar:
                best, bar = total, total * _CLEARLY
                taken[place] = rows
        least[place] = best
    return _walk(taken)


def joined_runs(
    cells: Sequence[Cell], menus: Menus, slack_s: Sequence[float] | None = None, price: float = 1.0
) -> tuple[list[int], float]:
    """The minimum over cuts of this one order, for several axes or for deadlines.

    A run pads to the largest item on every axis, so a filler can make it longer and every number of
    rows must be tried: T[i] = min over r of T[i + r] + c(join of cells i..i+r-1, r) + lateness.
    A run's lateness is `price` times the seconds by which it outlasts its rows' slack, as if it
    started now. It is exact for the order given; the order is a heuristic for several axes.

    Returns:
        The lengths of the runs from the front, and the total.
    """
    count = len(cells)
    least = [0.0] * (count + 1)
    taken = [0] * count
    for place in range(count - 1, -1, -1):
        best, bar = float("inf"), float("inf")
        cell, menu = cells[place], menus.menu(cells[place])
        late, late_for = 0.0, -1.0
        last = min(place + menus.grid.max_rows, count)
        for end in range(place + 1, last + 1):
            if cells[end - 1] is not cell:
                cell, wider = menus.join(cell, cells[end - 1])
                if wider is None:
                    break
                menu = wider
            if end - place > menu.max_rows:
                break
            seconds = menu.seconds[end - place]
            if slack_s is not None:
                start = end - 1 if seconds == late_for else place
                late = (late if seconds == late_for else 0.0) + _lateness(slack_s, start, end, seconds)
                late_for = seconds
            run = seconds + price * late
            # Longer runs cost no less and leave at least what waits behind `last`.
            if run + least[last] > bar:
                break
            total = run + least[end]
            if total <= bar:
                best, bar = min(best, total), min(best, total) / _CLEARLY
                taken[place] = end - place
        least[place] = best
    return _walk(taken), least[0]


def _lateness(slack_s: Sequence[float], start: int, end: int, seconds: float) -> float:
    return sum(seconds - slack_s[place] for place in range(start, end) if slack_s[place] < seconds)


def _walk(taken: Sequence[int]) -> list[int]:
    runs: list[int] = []
    place = 0
    while place < len(taken):
        rows = min(taken[place], len(taken) - place)
        runs.append(rows)
        place += rows
    return runs
