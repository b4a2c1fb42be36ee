"""The waiting rows of one model, in the order in which they should run. Pure; time is an argument.

Rows wait in one queue for each priority, earliest deadline first. The first of them are moved to the
*front*, which is planned as a whole; so the work for a launch is bounded by the front's length, whatever
waits behind it. The row at the head of the front is in the next run; the others fill it as they fit.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

from .clients import Clients
from .request import PRIORITIES, Request, Row
from .shares import Shares
from .waiting import Waiting

# Ended rows that may lie in the queues before they are swept out, however few rows wait.
_DEAD = 64
Queue = Waiting | Clients


class Line:
    """Rows by urgency, deadline and age.

    Args:
        max_age_s: after this many seconds a row goes before every younger one, whatever the priorities.
        weights: of the priorities, for their shares of the device's time; None for strict order.
        fair: whether the clients of a priority take turns. Their rows then go before older ones of other
            clients, and the age bound holds among the rows of a client and among priorities.

    Attributes:
        mixed: whether a newcomer may order the front anew: it holds rows of several priorities, of several
            clients that take turns, or of deadlines that pass others.
    """

    def __init__(
        self, max_age_s: float, weights: Mapping[int, float] | None = None, *, fair: bool = False
    ) -> None:
        self.mixed = False
        self._max_age_s = max_age_s
        self._shares = None if weights is None else Shares(weights)
        self._fair = fair
        self._queues: dict[int, Queue] = {
            priority: Clients() if fair else Waiting() for priority in PRIORITIES
        }
        # Those that are not empty, and perhaps some that have become so.
        self._busy: dict[int, Queue] = {}
        self._front: list[Row] = []
        self._dead = 0

    def __len__(self) -> int:
        """Rows held, those that ended and were not swept out yet included."""
        return len(self._front) + sum(map(len, self._queues.values()))

    def add(self, request: Request) -> None:
        """Put all rows of a request at the end of its priority's queue."""
        rows = [Row(request, index) for index in range(len(request.items))]
        early = bool(self._front) and self._front[-1].request.deadline_s > request.deadline_s
        queue = self._busy[request.priority] = self._queues[request.priority]
        queue.extend(rows, early=early)

    def charge(self, rows: Sequence[Row], seconds: float) -> None:
        """Rows of the front were launched, in a run of so many device seconds."""
        if self._fair:
            self._charge_clients(rows)
        if self._shares is not None:
            waiting = {priority for priority, queue in self._queues.items() if queue}
            self._shares.charge(rows, seconds, waiting | {row.request.priority for row in self._front})

    def _charge_clients(self, rows: Sequence[Row]) -> None:
        near = self._front if self.mixed else self._front[:1]
        for priority in {row.request.priority for row in rows} if self.mixed else [rows[0].request.priority]:
            queue = self._queues[priority]
            if isinstance(queue, Clients):
                mine = [row for row in rows if row.request.priority == priority]
                queue.charge(mine, {row.request.client for row in near if row.request.priority == priority})

    def forget(self, rows: int) -> None:
        """So many waiting rows have ended and will be skipped; swept out once they are the most."""
        self._dead += rows
        if self._dead > _DEAD and 2 * self._dead > len(self):
            self._dead = 0
            for queue in self._queues.values():
                queue.keep(row for row in queue if not row.request.over)

    def clear(self) -> list[Row]:
        """Take every waiting row out."""
        rows = [*self._front, *(row for queue in self._queues.values() for row in queue)]
        for queue in self._queues.values():
            queue.clear()
        self._front = []
        return [row for row in rows if not row.taken and not row.request.over]

    def others_wait(self, priority: int) -> bool:
        """Whether rows wait behind the front that may go before others of this priority."""
        return any(queue.passed or (queue and other != priority) for other, queue in self._busy.items())

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

    def front(self, now_s: float, most: int, few: int | None = None) -> list[Row]:
        """The first rows, at most so many, without those that ended, left or are late.

        Late rows never run; the deadline timer answers them.

        Args:
            now_s: the time.
            most: most rows of the front.
            few: most of them where clients take turns, since the front is then taken anew at each launch.
        """
        front = self._front = [
            row
            for row in self._front
            if not row.taken and not row.request.over and row.request.deadline_s > now_s
        ]
        self._busy = {priority: queue for priority, queue in self._busy.items() if queue}
        queues = list(self._busy.values())
        passed = any(queue.passed for queue in queues)
        priorities = {row.request.priority for row in (front if self.mixed else front[:1])}
        priorities.update(self._busy)
        if self._fair and not passed:
            passed = len({row.request.client for row in (front if self.mixed else front[:1])}) > 1
        self.mixed = len(priorities) > 1 or passed
        bound_s = now_s - self._max_age_s
        if self.mixed and (self._fair or (len(priorities) > 1 and self._shares is not None)):
            self._fill_anew(most if few is None or not self._fair else few, now_s, bound_s)
        elif self.mixed:
            self._fill_by_order(front, queues, most, now_s, bound_s)
        elif queues:
            (queue,) = queues
            while queue and len(front) < most:
                row = queue.pop(bound_s)
                if not row.request.over and row.request.deadline_s > now_s:
                    front.append(row)
        return front

    def _put_back(self, row: Row) -> None:
        queue = self._busy[row.request.priority] = self._queues[row.request.priority]
        queue.put_back(row)

    def _fill_by_order(
        self, front: list[Row], queues: Sequence[Queue], most: int, now_s: float, bound_s: float
    ) -> None:
        """Take from the queues what belongs into the front, and put back what no longer does."""

        def place(row: Row) -> tuple[int, float, float]:
            """Aged rows by arrival, then the others by priority, deadline and arrival."""
            request = row.request
            if request.arrived_s <= bound_s:
                return 0, request.arrived_s, 0.0
            return request.priority, request.deadline_s, request.arrived_s

        front.sort(key=place)
        last = place(front[-1]) if front else (0, -math.inf, 0.0)
        heads = [(place(queue.head(bound_s)), index) for index, queue in enumerate(queues)]
        heapq.heapify(heads)
        while heads and (len(front) < most or heads[0][0] < last):
            queue = queues[index := heads[0][1]]
            row = queue.pop(bound_s)
            if not row.request.over and row.request.deadline_s > now_s:
                front.append(row)
            if queue:
                heapq.heapreplace(heads, (place(queue.head(bound_s)), index))
            else:
                heapq.heappop(heads)
        front.sort(key=place)
        for row in reversed(front[most:]):
            self._put_back(row)
        del front[most:]

    def _fill_anew(self, most: int, now_s: float, bound_s: float) -> None:
        """Take the front anew: the next row is given by the most urgent priority, or the one of smallest tag.

        A row that is older than the bound goes before those that are not; where several priorities have
        such rows the weights decide among them, or a full queue would be served by arrival alone.
        """
        front, shares = self._front, self._shares
        tags = None if shares is None else shares.starts()
        for row in reversed(front):
            self._put_back(row)
        front.clear()
        for queue in self._busy.values():
            if isinstance(queue, Clients):
                queue.restart()

        def place(priority: int) -> tuple[bool, float, int]:
            arrived_s = self._queues[priority].head(bound_s).request.arrived_s
            young = arrived_s > bound_s
            if tags is not None:
                return young, tags[priority], priority
            return young, 0.0 if young else arrived_s, priority

        heads = [place(priority) for priority in self._busy]
        heapq.heapify(heads)
        several = len(heads) > 1
        while heads and len(front) < most:
            priority = heads[0][2]
            queue = self._queues[priority]
            row = queue.pop(bound_s)
            if not row.request.over and row.request.deadline_s > now_s:
                front.append(row)
                if tags is not None and shares is not None:
                    tags[priority] += shares.step(row)
            if not queue:
                heapq.heappop(heads)
            elif several:
                heapq.heapreplace(heads, place(priority))
