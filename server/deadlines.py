"""Deadlines of live requests: a heap with lazy deletion.

Adding costs O(log n); a request that ended is dropped when it comes to the top, or when more than half of
the heap is dead, so that cancelled requests do not pile up.
"""

import heapq
import itertools
import math

from .request import Request


class Deadlines:
    """Which live request is due next. Requests without a deadline are never stored."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, unless it has no deadline."""
        if request.deadline_s < math.inf:
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

    def compact(self) -> None:
        """Drop the dead if they are most of the heap."""
        live = [entry for entry in self._heap if not entry[2].over]
        if len(live) * 2 < len(self._heap):
            heapq.heapify(live)
            self._heap = live
