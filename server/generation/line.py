"""Waiting sequences in the order in which they join: strictly by urgency, or by the weights of priorities."""

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

from ..batching.request import PRIORITIES, Row
from ..batching.shares import Shares
from .sequence import Generation


class _Used(NamedTuple):
    """Tokens of a sequence, as `Shares` sees a row: its size, and whose it is."""

    sizes: tuple[int, ...]
    request: Generation


class Line:
    """One queue for each priority, by arrival.

    With weights the tokens that a priority's texts were computed for count against it, and the next one to
    join is of the priority that had least for its weight; see `Shares`.

    Args:
        weights: by priority, those not named have 1; None for strict order.
    """

    def __init__(self, weights: Mapping[int, float] | None = None) -> None:
        self._queues: dict[int, list[Generation]] = {priority: [] for priority in PRIORITIES}
        self._shares = None if weights is None else Shares(weights)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Generation]:
        """The next one to join first; nothing may be added or removed meanwhile."""
        if self._shares is None:
            for queue in self._queues.values():
                yield from queue
            return
        tags = self._shares.starts()
        heads = [(tags[priority], priority, 0) for priority, queue in self._queues.items() if queue]
        heapq.heapify(heads)
        while heads:
            tag, priority, at = heads[0]
            queue = self._queues[priority]
            yield queue[at]
            if at + 1 == len(queue):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (tag + self._shares.step(_used(queue[at])), priority, at + 1))

    def add(self, one: Generation) -> None:
        """A newcomer, or one that gave its pages up and goes to its old place."""
        bisect.insort(self._queues[one.priority], one, key=lambda other: other.rank)

    def remove(self, one: Generation) -> None:
        """It joins, or is over."""
        self._queues[one.priority].remove(one)

    def charge(self, launched: Iterable[tuple[Generation, int]]) -> None:
        """Sequences were launched with so many tokens each."""
        if self._shares is None:
            return
        rows = [_used(one, tokens) for one, tokens in launched]
        waiting = [priority for priority, queue in self._queues.items() if queue]
        self._shares.charge(rows, float(sum(math.prod(row.sizes) for row in rows)), waiting)


def _used(one: Generation, tokens: int | None = None) -> Row:
    """Of so many tokens; by default of all that it may still take."""
    if tokens is None:
        tokens = len(one.prompt) + len(one.text) + one.left
    return cast(Row, _Used((tokens,), one))
