"""From a cut of the sorted list to runs in the order of their launch.

Rows of one cell cost the same in any run, so a cut only fixes how many of each cell a run takes, and
two things are free. The oldest of a cell take part first, so that nobody is overtaken by an equal. And
of the runs that take a row of the oldest row's cell, the fullest goes first: a run that was filled up
with shorter rows, because there were no better ones, may find better ones later.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from .menu import Cell

Fullness = Callable[[Sequence[int]], float]


def first_launched(
    segments: Sequence[Sequence[int]], cells: Sequence[Cell], first: int, fullness: Fullness
) -> list[int]:
    """The rows of the run to launch now, among them `first`, in order of arrival.

    Args:
        segments: The rows of each run of the cut.
        cells: The cell of each row.
        first: A row that must take part.
        fullness: The share of a run's bucket that its rows fill.
    """
    wanted = cells[first]
    takers = [segment for segment in segments if any(cells[row] == wanted for row in segment)]
    chosen = max(takers, key=fullness) if len(takers) > 1 else takers[0]
    needed = Counter(map(cells.__getitem__, chosen))
    needed[wanted] -= 1
    rows = [first]
    for row, cell in enumerate(cells):
        if needed.get(cell) and row != first:
            needed[cell] -= 1
            rows.append(row)
            if len(rows) == len(chosen):
                break
    return sorted(rows)


def launched(segments: Sequence[Sequence[int]], cells: Sequence[Cell], fullness: Fullness) -> list[list[int]]:
    """The rows of every run, in the order of launch: each run holds the oldest row that is left.

    It launches what repeated calls of `first_launched` would, if no row came or was planned anew.
    """
    waiting: defaultdict[Cell, deque[int]] = defaultdict(deque)
    for row, cell in enumerate(cells):
        waiting[cell].append(row)
    takers: defaultdict[Cell, deque[int]] = defaultdict(deque)
    fullest = sorted(range(len(segments)), key=lambda number: fullness(segments[number]), reverse=True)
    for number in fullest:
        for cell in {cells[row] for row in segments[number]}:
            takers[cell].append(number)
    gone = [False] * len(cells)
    done = [False] * len(segments)
    runs: list[list[int]] = []
    for row, cell in enumerate(cells):
        if gone[row]:
            continue
        while done[takers[cell][0]]:
            takers[cell].popleft()
        number = takers[cell][0]
        done[number] = True
        run = sorted(waiting[cells[member]].popleft() for member in segments[number])
        for member in run:
            gone[member] = True
        runs.append(run)
    return runs
