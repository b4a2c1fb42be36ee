"""A batcher that packs waiting requests into one row, for the comparison with padding."""

import math
from collections import deque

from ..bucketing import Bucket, Ladder
from ..server.batching.batcher import Launch
from ..server.batching.request import Request, Row


class PackingBatcher:
    """Packs one row a launch: the oldest request, then of those behind it the longest that still fit.

    Best-fit decreasing with one open row, and the oldest goes first, so nobody is overtaken for ever.
    Of the capacities that hold the oldest request the one that is filled best is taken, on a tie the
    larger.

    Args:
        capacities: Rungs of the packed row's length; one rung is one program.
        window: How many of the oldest requests are looked at.
    """

    def __init__(self, capacities: Ladder, window: int = 256) -> None:
        self._window = window
        self._buckets = [Bucket(("batch", "length"), (1, rung)) for rung in capacities]
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Let a request of one row wait."""
        self._waiting.append(request)

    def next(self, now_s: float) -> Launch | float:
        """A packed row, if anything waits; the time is not looked at, since an idle device never waits."""
        if not self._waiting:
            return math.inf
        window = [self._waiting.popleft() for _ in range(min(self._window, len(self._waiting)))]
        lengths = [request.sizes[0][0] for request in window]
        order = sorted(range(1, len(window)), key=lambda place: -lengths[place])
        best: tuple[float, list[int], Bucket] | None = None
        for bucket in self._buckets:
            if bucket.elements < lengths[0]:
                continue
            chosen, real = _filled(lengths, order, bucket.elements)
            if best is None or real / bucket.elements >= best[0]:
                best = real / bucket.elements, chosen, bucket
        if best is None:
            raise ValueError(f"A request must fit the largest packed row; got {lengths[0]} tokens.")
        _, chosen, bucket = best
        taken = set(chosen)
        left = [request for place, request in enumerate(window) if place not in taken]
        self._waiting.extendleft(reversed(left))
        return Launch(bucket, tuple(Row(window[place], 0) for place in sorted(chosen)), "idle")


def _filled(lengths: list[int], order: list[int], capacity: int) -> tuple[list[int], int]:
    """The places that go into a row with the oldest, and how many tokens they have."""
    chosen, free = [0], capacity - lengths[0]
    for place in order:
        if free == 0:
            break
        if lengths[place] <= free:
            chosen.append(place)
            free -= lengths[place]
    return chosen, capacity - free
