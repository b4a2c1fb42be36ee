"""The waiting rows of one priority: earliest deadline first, and the oldest of them when age counts. Pure.

Most rows come in the order of their deadlines, since callers allow about the same time: they go through a
plain deque. Only those that must pass others are kept in heaps, with lazy deletion.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from .request import Row

_SMALL = 64
Entry = tuple[float, int, Row]


class Waiting:
    """Rows of one priority.

    A row without a deadline comes after those that have one, and rows with the same in order of arrival.
    """

    def __init__(self) -> None:
        # Rising in deadline and in arrival.
        self._line: deque[Row] = deque()
        # Rows that are due before others that came earlier, each with its place among equals.
        self._early: dict[Row, int] = {}
        self._by_deadline: list[Entry] = []
        self._by_arrival: list[Entry] = []
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._early)

    def __iter__(self) -> Iterator[Row]:
        """All rows, by arrival."""
        if not self._early:
            return iter(self._line)
        early = sorted(self._early, key=self._early.__getitem__)
        return iter(sorted([*self._line, *early], key=_arrival))

    def __reversed__(self) -> Iterator[Row]:
        return reversed(self._line if not self._early else list(self))

    @property
    def passed(self) -> bool:
        """Whether a row may go before one that came earlier."""
        return bool(self._early)

    def extend(self, rows: list[Row], *, early: bool = False) -> None:
        """Add the rows of a new request; `early` if they may go before rows that were taken out already."""
        in_turn = not self._line or rows[0].request.deadline_s >= self._line[-1].request.deadline_s
        if in_turn and not early:
            self._line.extend(rows)
            return
        for row in rows:
            self._last += 1
            self._add_early(row, self._last)

    def put_back(self, row: Row) -> None:
        """Add a row that was taken out; of several, the one that was to go last comes first."""
        if self._line:
            mine, head = row.request, self._line[0].request
            if mine.deadline_s > head.deadline_s or mine.arrived_s > head.arrived_s:
                self._first -= 1
                self._add_early(row, self._first)
                return
        self._line.appendleft(row)

    def head(self, bound_s: float) -> Row:
        """The row that goes next: the oldest if it arrived by `bound_s`, else the one that is due first."""
        if not self._early:
            return self._line[0]
        oldest, due = self._top(self._by_arrival), self._top(self._by_deadline)
        if self._line:
            oldest = min(self._line[0], oldest, key=_arrival)
            due = min(self._line[0], due, key=_deadline)
        return oldest if oldest.request.arrived_s <= bound_s else due

    def pop(self, bound_s: float) -> Row:
        """Take out the row that goes next."""
        if not self._early:
            return self._line.popleft()
        row = self.head(bound_s)
        if self._early.pop(row, None) is None:
            self._line.popleft()
        return row

    def keep(self, rows: Iterable[Row]) -> None:
        """Hold only these of the rows, given by arrival."""
        kept, early = list(rows), self._early
        self.clear()
        self._line.extend([row for row in kept if row not in early])
        for row in kept:
            if row in early:
                self._add_early(row, early[row])

    def clear(self) -> None:
        """Forget all rows."""
        self._line, self._early = deque(), {}
        self._by_deadline, self._by_arrival = [], []

    def _add_early(self, row: Row, place: int) -> None:
        if len(self._by_deadline) > 2 * len(self._early) + _SMALL:
            self._by_deadline = self._swept(self._by_deadline)
            self._by_arrival = self._swept(self._by_arrival)
        self._early[row] = place
        heapq.heappush(self._by_deadline, (row.request.deadline_s, place, row))
        heapq.heappush(self._by_arrival, (row.request.arrived_s, place, row))

    def _swept(self, heap: list[Entry]) -> list[Entry]:
        swept = [entry for entry in heap if self._valid(entry)]
        heapq.heapify(swept)
        return swept

    def _top(self, heap: list[Entry]) -> Row:
        while not self._valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][2]

    def _valid(self, entry: Entry) -> bool:
        return self._early.get(entry[2]) == entry[1]


def _arrival(row: Row) -> float:
    return row.request.arrived_s


def _deadline(row: Row) -> float:
    return row.request.deadline_s
