"""The waiting rows of one priority where clients take turns. Pure bookkeeping.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), as among priorities and among models: a launch
moves a client's tag on by the real elements it took, and the smallest tag goes first. So clients that all
have rows waiting get the same number of elements, to within a row of each; what one does not use goes to the
others; and a client that comes anew goes next, whatever another has piled up, where the round robin of
Shreedhar and Varghese ("Efficient fair queuing using deficit round robin", SIGCOMM 1995) would have it wait
for a turn of everybody else, and could not take back what it planned. A row costs one heap step, so time
grows with the logarithm of the clients that wait.

Virtual time, which is the tag of a newcomer, goes on by what was launched over the number of clients that
share it: clients that come once and never again cannot keep those with a backlog from their turn.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from .request import Row
from .waiting import Waiting

_SMALL = 64
_arrival = attrgetter("request.arrived_s")


class _Client:
    """One client's rows, by deadline.

    Attributes:
        base: its tag by what was launched.
        tag: its tag by what was taken out, launched or not; as long as it has rows.
        serial: of its valid entry in the order.
    """

    __slots__ = ("base", "rows", "serial", "tag")

    def __init__(self, tag: float) -> None:
        self.base = self.tag = tag
        self.rows = Waiting()
        self.serial = 0


Entry = tuple[float, int, _Client]  # tag, serial, client


class Clients:
    """Rows of one priority; used as `Waiting` is.

    The rows of one client go by deadline, and the oldest first when age counts. Age counts among the rows of
    one client only: in a queue that is longer than the age bound it would undo the turns.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        # An entry is valid if its client has rows and this serial.
        self._order: list[Entry] = []
        self._moved: dict[_Client, None] = {}
        self._last: _Client | None = None
        self._rows = self._active = self._serial = 0
        self._now = 0.0
        self._sweep_at = _SMALL

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Row]:
        """All rows, by arrival."""
        return heapq.merge(*[one.rows for one in self._clients.values()], key=_arrival)

    def __reversed__(self) -> Iterator[Row]:
        queues = [reversed(one.rows) for one in self._clients.values() if one.rows]
        return heapq.merge(*queues, key=_arrival, reverse=True)

    @property
    def passed(self) -> bool:
        """Whether a row may go before one that came earlier, or was taken out before."""
        if self._active != 1:
            return self._active > 1
        only = self._first()
        return only is not self._last or only.rows.passed

    def extend(self, rows: list[Row], *, early: bool = False) -> None:
        """Add the rows of a new request; `early` if they may go before rows that were taken out already."""
        client = self._of(rows[0])
        fresh = not client.rows
        client.rows.extend(rows, early=early)
        self._rows += len(rows)
        if fresh:
            client.base = client.tag = max(client.base, self._now)
            self._active += 1
            self._push(client)

    def put_back(self, row: Row) -> None:
        """Add a row that was taken out; of several, the one that was to go last comes first."""
        client = self._of(row)
        self._active += not client.rows
        client.rows.put_back(row)
        self._rows += 1
        self._moved.pop(client, None)
        self._moved[client] = None

    def restart(self) -> None:
        """What was taken out and not launched has been put back: the order begins at what was launched."""
        for client in reversed(self._moved):  # who was taken out first was put back last
            client.tag = client.base
            self._push(client)
        self._moved.clear()

    def head(self, bound_s: float) -> Row:
        """The row that goes next; among the rows of its client the oldest if it arrived by `bound_s`."""
        return self._first().rows.head(bound_s)

    def pop(self, bound_s: float) -> Row:
        """Take out the row that goes next."""
        client = self._first()
        row = client.rows.pop(bound_s)
        self._rows -= 1
        self._last = client
        if not row.request.over:
            client.tag += _elements(row)
        if client.rows:
            self._moved[client] = None
            heapq.heapreplace(self._order, self._entry(client))
        else:
            self._moved.pop(client, None)
            heapq.heappop(self._order)
            self._active -= 1
        return row

    def charge(self, rows: Sequence[Row], near: Iterable[str]) -> None:
        """Rows of this priority were launched.

        Args:
            rows: launched.
            near: clients with rows that were taken out, those of the launched ones included.
        """
        clients = [self._of(row) for row in rows]
        self._now = max(self._now, min(client.base for client in clients))
        total = 0
        for row, client in zip(rows, clients, strict=True):
            elements = _elements(row)
            client.base += elements
            total += elements
        known = (self._clients.get(name) for name in near)
        sharing = self._active + sum(client is None or not client.rows for client in known)
        self._now += total / max(1, sharing)

    def keep(self, rows: Iterable[Row]) -> None:
        """Hold only these of the rows, given by arrival."""
        kept: dict[_Client, list[Row]] = {}
        for row in rows:
            kept.setdefault(self._of(row), []).append(row)
        for client in self._clients.values():
            client.rows.keep(kept.get(client, ()))
        self._moved = {client: None for client in self._moved if client in kept}
        self._rows = sum(map(len, kept.values()))
        self._active = len(kept)

    def clear(self) -> None:
        """Forget all rows."""
        self.keep(())

    def _of(self, row: Row) -> _Client:
        name = row.request.client
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= self._sweep_at:
                self._sweep()
            client = self._clients[name] = _Client(self._now)
        return client

    def _sweep(self) -> None:
        """Forget clients without rows, but those that are ahead of virtual time, who would gain by it."""
        self._clients = {name: one for name, one in self._clients.items() if one.rows or one.base > self._now}
        self._sweep_at = 2 * len(self._clients) + _SMALL

    def _push(self, client: _Client) -> None:
        if len(self._order) > 2 * self._active + _SMALL:
            self._order = [entry for entry in self._order if entry[1] == entry[2].serial and entry[2].rows]
            heapq.heapify(self._order)
        heapq.heappush(self._order, self._entry(client))

    def _entry(self, client: _Client) -> Entry:
        client.serial = self._serial = self._serial + 1
        return client.tag, client.serial, client

    def _first(self) -> _Client:
        order = self._order
        while True:
            _, serial, client = order[0]
            if serial == client.serial and client.rows:
                return client
            heapq.heappop(order)


def _elements(row: Row) -> int:
    return math.prod(row.sizes) or 1
