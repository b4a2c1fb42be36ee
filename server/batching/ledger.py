"""The books of a queue: which requests live, what waits, what runs.

Pure; the dispatcher's lock guards it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..errors import Overloaded, ServerError
from .admission import Load, QueueLimits, admit
from .request import PRIORITIES, Request, Row, State


class Ledger:
    """Counts that follow from what entered, was launched, landed and ended.

    Attributes:
        live: requests without a final state.
        load: what waits, over all lanes.
        waiting: rows that wait, by lane.
        running: rows that were launched and have not landed, by lane.
        ahead: real elements that wait, by lane and priority.
        clients: rows that wait, by client, of requests that name one.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.live: set[Request] = set()
        self.load = Load()
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.ahead: list[list[int]] = []
        self.clients: Counter[str] = Counter()

    def add_lane(self) -> None:
        """Count for one more model."""
        self.waiting.append(0)
        self.running.append(0)
        self.ahead.append([0] * (PRIORITIES[-1] + 1))

    @property
    def busy(self) -> bool:
        """Whether a row runs."""
        return any(self.running)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.live and not self.busy

    @property
    def limits(self) -> QueueLimits:
        """Bounds on what waits."""
        return self._limits

    def admit(
        self,
        request: Request,
        less_urgent: Callable[[], Iterable[Request]] = tuple,
        retry_after_s: Callable[[], float] = lambda: 1.0,
    ) -> Sequence[Request]:
        """Let a request in if the limits allow it, or would without some less urgent ones.

        Args:
            request: the newcomer.
            less_urgent: gives waiting requests that may have to give way, the first of them first.
            retry_after_s: gives the advice for a refusal; asked only then.

        Returns:
            Those that must give way; they are still counted.

        Raises:
            Overloaded, TooManyRows, PayloadTooLarge: as `servax.server.batching.admission.admit`.
        """
        victims: Sequence[Request] = ()
        try:
            self._check(request, self.load, self.clients[request.client])
        except Overloaded:
            victims = self._victims(request, less_urgent())
            if not victims:
                self._check(request, self.load, self.clients[request.client], retry_after_s())
                raise
        if request.client:
            self.clients[request.client] += request.waiting_rows
        self.ahead[request.lane][request.priority] += request.waiting_elements
        self.live.add(request)
        self.load.add(request.waiting_rows, request.waiting_elements, request.nbytes)
        self.waiting[request.lane] += request.waiting_rows
        return victims

    def _victims(self, request: Request, less_urgent: Iterable[Request]) -> list[Request]:
        room, rows, victims = self.load.copy(), self.clients[request.client], []
        for victim in less_urgent:
            victims.append(victim)
            room.add(-victim.waiting_rows, -victim.waiting_elements, -victim.nbytes)
            if victim.client == request.client:
                rows -= victim.waiting_rows
            try:
                self._check(request, room, rows)
            except Overloaded:
                continue
            return victims
        return []

    def _check(self, request: Request, load: Load, client_rows: int, retry_after_s: float = 1.0) -> None:
        rows = client_rows if request.client else -request.waiting_rows
        admit(self._limits, load, request, client_rows=rows, retry_after_s=retry_after_s)

    def share(self, request: Request) -> float:
        """Of the rows that wait in a newcomer's priority, the part that goes before it.

        Where clients take turns it waits for what its own client has before it, and as much of each other.
        An estimate: rows of all models and priorities are counted together.
        """
        if not (self._limits.fair and request.client and self.load.rows):
            return 1.0
        own = self.clients[request.client] + request.waiting_rows
        return min(1.0, own * (len(self.clients) + 1) / self.load.rows)

    def launch(self, lane: int, rows: Sequence[Row]) -> int:
        """Rows of a lane leave the queue for the device; returns their real elements."""
        elements = nbytes = 0
        for row in rows:
            request, size = row.request, math.prod(row.sizes)
            elements += size
            self.ahead[lane][request.priority] -= size
            if request.client:
                self._leave(request.client, 1)
            request.waiting_rows -= 1
            request.waiting_elements -= size
            if request.waiting_rows == 0:
                nbytes += request.nbytes
            if request.state is State.WAITING:
                request.move(State.RUNNING)
        self.load.add(-len(rows), -elements, -nbytes)
        self.waiting[lane] -= len(rows)
        self.running[lane] += len(rows)
        return elements

    def land(self, rows: Sequence[Row]) -> None:
        """Launched rows have come back, with outputs or without."""
        if rows:
            self.running[rows[0].request.lane] -= len(rows)

    def end(self, request: Request, state: State, error: ServerError | None = None) -> int:
        """Give a request its final state.

        Returns:
            How many of its rows were still waiting; they count no more.
        """
        request.move(state, error)
        self.live.discard(request)
        rows = request.waiting_rows
        if rows:
            self.load.add(-rows, -request.waiting_elements, -request.nbytes)
            self.waiting[request.lane] -= rows
            self.ahead[request.lane][request.priority] -= request.waiting_elements
            if request.client:
                self._leave(request.client, rows)
            request.waiting_rows = request.waiting_elements = 0
        return rows

    def _leave(self, client: str, rows: int) -> None:
        self.clients[client] -= rows
        if not self.clients[client]:
            del self.clients[client]  # or the table would grow with every client that ever came
