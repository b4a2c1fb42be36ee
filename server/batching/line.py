"""The waiting rows of one model, in the order in which they should run. Pure; time is an argument.

Rows wait in one queue for each priority. The first of them are moved to the *front*, which is planned as a
whole; so the work for a launch is bounded by the front's length, whatever waits behind it.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator

from .request import PRIORITIES, Request, Row

# Ended rows that may lie in the queues before they are swept out, however few rows wait.
_DEAD = 64


class Line:
    """Rows by urgency and age.

    Args:
        max_age_s: after this many seconds a row goes before every younger one, whatever the priorities.

    Attributes:
        mixed: whether the front holds rows of several priorities, so that ages may order it anew.
    """

    def __init__(self, max_age_s: float) -> None:
        self.mixed = False
        self._max_age_s = max_age_s
        self._queues: dict[int, deque[Row]] = {priority: deque() for priority in PRIORITIES}
        self._front: list[Row] = []
        self._dead = 0

    def __len__(self) -> int:
        """Rows held, those that ended and were not swept out yet included."""
        return len(self._front) + sum(map(len, self._queues.values()))

    def add(self, request: Request) -> None:
        """Put all rows of a request at the end of its priority's queue."""
        self._queues[request.priority].extend([Row(request, index) for index in range(len(request.items))])

    def forget(self, rows: int) -> None:
        """So many waiting rows have ended and will be skipped; swept out once they are the most."""
        self._dead += rows
        if self._dead > _DEAD and 2 * self._dead > len(self):
            self._dead = 0
            for priority, queue in self._queues.items():
                self._queues[priority] = deque(row for row in queue if not row.request.over)

    def clear(self) -> list[Row]:
        """Take every waiting row out."""
        rows = [*self._front, *(row for queue in self._queues.values() for row in queue)]
        for queue in self._queues.values():
            queue.clear()
        self._front = []
        return [row for row in rows if not row.taken and not row.request.over]

    def others_wait(self, priority: int) -> bool:
        """Whether rows of another priority wait behind the front."""
        return any(queue for other, queue in self._queues.items() if other != priority)

    def less_urgent(self, priority: int) -> Iterator[Request]:
        """Requests of lower urgency of which no row was launched: the least urgent, and youngest, first."""
        last: Request | None = None
        for lower in range(PRIORITIES[-1], priority, -1):
            for rows in (self._queues[lower], self._front):
                for row in reversed(rows):
                    request = row.request
                    if request.priority != lower or request is last or row.taken or request.over:
                        continue
                    last = request
                    if request.waiting_rows == len(request.items):
                        yield request

    def front(self, now_s: float, most: int) -> list[Row]:
        """The first rows, at most so many, without those that ended, left or are late.

        Late rows never run; the deadline timer answers them.
        """
        front = self._front = [
            row
            for row in self._front
            if not row.taken and not row.request.over and row.request.deadline_s > now_s
        ]
        queues = [queue for queue in self._queues.values() if queue]
        priorities = {row.request.priority for row in front} if self.mixed else set()
        priorities |= {queue[0].request.priority for queue in (front[:1], *queues) if queue}
        self.mixed = len(priorities) > 1
        if self.mixed:
            self._fill_by_order(front, queues, most, now_s)
        elif queues:
            (queue,) = queues
            while queue and len(front) < most:
                row = queue.popleft()
                if not row.request.over and row.request.deadline_s > now_s:
                    front.append(row)
        return front

    def _fill_by_order(self, front: list[Row], queues: list[deque[Row]], most: int, now_s: float) -> None:
        """Take from the queues what belongs into the front, and put back what no longer does."""
        bound_s = now_s - self._max_age_s

        def place(row: Row) -> tuple[int, float]:
            """Aged rows by arrival, then the others by priority and arrival."""
            arrived_s = row.request.arrived_s
            return (0 if arrived_s <= bound_s else row.request.priority), arrived_s

        front.sort(key=place)
        last = place(front[-1]) if front else (0, -math.inf)
        heads = [(place(queue[0]), index) for index, queue in enumerate(queues)]
        heapq.heapify(heads)
        while heads and (len(front) < most or heads[0][0] < last):
            queue = queues[index := heads[0][1]]
            row = queue.popleft()
            if not row.request.over and row.request.deadline_s > now_s:
                front.append(row)
            if queue:
                heapq.heapreplace(heads, (place(queue[0]), index))
            else:
                heapq.heappop(heads)
        front.sort(key=place)
        for row in reversed(front[most:]):
            self._queues[row.request.priority].appendleft(row)
        del front[most:]
