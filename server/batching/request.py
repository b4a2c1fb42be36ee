"""A request: its rows, its state and the table of moves between states."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import ServerError
from .pins import pin_of_call
from .together import Together, run_of_call


class State(enum.Enum):
    """Where a request is. Everything but WAITING and RUNNING is final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    # Members are singletons; Enum's own hash is Python code, 0.2 us on every look-up in MOVES.
    __hash__ = object.__hash__


# A request is RUNNING from the launch of its first row; the rows of a split one may run in several batches.
MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FAILED, State.EXPIRED, State.CANCELLED}),
    State.RUNNING: frozenset({State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.EXPIRED: frozenset(),
    State.CANCELLED: frozenset(),
}

Item = Mapping[str, np.ndarray]
DEFAULT_PRIORITY = 5
PRIORITIES = range(1, 10)


class IllegalMove(RuntimeError):
    """A request was moved against the table; nothing was changed."""


class Sink(Protocol):
    """Where final requests go: one per kind of waiter, so that a batch wakes each waiter's thread once.

    Attributes:
        lag_s: seconds between handing over and the waiter's knowing, lately.
    """

    lag_s: float

    def deliver(self, requests: Sequence["Request"]) -> None:
        """Hand over requests in their final state; must not block."""
        ...


class Request:
    """One call: rows that are answered together, exactly once.

    Attributes:
        items: arrays of each row by input name, without a batch dim.
        sizes: sizes of each row on the varying axes.
        priority: 1 (most urgent) to 9.
        arrived_s: when it came, on the server's clock.
        deadline_s: when it must be answered, on the server's clock; infinity for none.
        sink: who is told of the final state.
        future: whatever the sink needs to find the waiter.
        lane: index of its model in the dispatcher.
        client: who sent it, where clients share the queue; "" where they do not.
        pin: told where each row ran, if every row runs in the bucket of its size alone; else None.
        pin_at: place of the first row in the pin.
        together: the run that was planned of its rows; None for those that are planned as they wait.
        trace: where the batches that it takes part in are noted; None unless it is traced.
        nbytes: bytes of all its arrays.
        state: see `MOVES`; changed by `move` only.
        over: whether the state is final, so that no more work must be done for it.
        results: outputs of each row, filled as its batches end.
        error: why it failed, once it has.
        remaining: rows without a result.
        waiting_rows: rows not launched yet.
        waiting_elements: real elements of those rows (product of the sizes, summed).
    """

    __slots__ = (
        "arrived_s", "client", "deadline_s", "error", "future", "items", "lane", "nbytes", "over", "pin",
        "pin_at", "priority", "remaining", "results", "sink", "sizes", "state", "together", "trace",
        "waiting_elements", "waiting_rows",
    )  # fmt: skip

    def __init__(
        self,
        items: Sequence[Item],
        sizes: Sequence[tuple[int, ...]],
        *,
        arrived_s: float,
        sink: Sink,
        future: Any = None,
        priority: int = DEFAULT_PRIORITY,
        deadline_s: float = math.inf,
    ) -> None:
        self.items = items
        self.sizes = sizes
        self.priority = priority
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.sink = sink
        self.future = future
        self.lane = 0
        self.client = ""
        self.pin = pin_of_call()
        self.pin_at = 0
        if self.pin is not None:
            self.pin_at = len(self.pin.buckets)
            self.pin.buckets += [None] * len(items)
        self.together: Together | None = run_of_call()
        self.trace: Any = None
        self.nbytes = sum([array.nbytes for item in items for array in item.values()])
        self.state = State.WAITING
        self.over = False
        self.results: list[list[np.ndarray] | None] = [None] * len(items)
        self.remaining = self.waiting_rows = len(items)
        self.waiting_elements = sum(map(math.prod, sizes))
        self.error: ServerError | None = None

    def move(self, state: State, error: ServerError | None = None) -> None:
        """Go to another state.

        Raises:
            IllegalMove: if the table does not allow it; nothing changes.
        """
        if state not in MOVES[self.state]:
            allowed = sorted(one.value for one in MOVES[self.state]) or "nothing"
            raise IllegalMove(f"a request that is {self.state.value} may become {allowed}; got {state.value}")
        self.state = state
        self.error = error
        self.over = not MOVES[state]


class Row:
    """One row of a request, the unit that is planned and batched.

    Attributes:
        request: whose row it is.
        index: which of its rows.
        sizes: sizes on the varying axes.
        taken: whether it was launched.
    """

    __slots__ = ("index", "request", "sizes", "taken")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.sizes = request.sizes[index]
        self.taken = False

    @property
    def item(self) -> Item:
        """Arrays by input name."""
        return self.request.items[self.index]
