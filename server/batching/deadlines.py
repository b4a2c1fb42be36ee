"""Deadlines of live requests: a heap with lazy deletion.

Adding costs O(log n) amortised. A request that ended is dropped when it comes to the top, or when the heap
has doubled since it was last swept, so that neither answered nor cancelled requests pile up behind a
distant deadline.
"""

import heapq
import itertools
import math

from .request import Request

_SMALL = 64


class Deadlines:
    """Which live request is due next. Requests without a deadline are never stored."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._sweep_at = _SMALL

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, unless it has no deadline."""
        if request.deadline_s == math.inf:
            return
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].over]
            heapq.heapify(self._heap)
            self._sweep_at = max(_SMALL, 2 * len(self._heap))
        heapq.heappush(self._heap, (request.deadline_s, next(self._order), request))

    def next_s(self) -> float:
        """When the earliest live request is due; infinity if none is."""
        while self._heap and self._heap[0][2].over:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now_s: float) -> list[Request]:
        """Take out every live request whose deadline has come, earliest first."""
        out = []
        while self.next_s() <= now_s:
            out.append(heapq.heappop(self._heap)[2])
        return out
