"""When what waits will be through: the work ahead in predicted seconds. Pure; time is an argument.

A lane's pace, predicted device seconds for one real element, is learned from its launches: so it holds the
cost model's times and the padding and batch sizes that this traffic really gets. How much longer things take
than predicted, between batches above all, is learned from the time between two launches of a full queue.
"""

import math
from collections.abc import Mapping, Sequence

from .admission import too_late
from .patience import Patience
from .request import Request

# A launch counts for a tenth: the pace follows a change of traffic within some twenty launches.
_WEIGHT = 0.1
_UNKNOWN_S = 1.0
_LEAST_S, _MOST_S = 0.01, 60.0
# An answer is promised only if four fifths of the time would do: half of those at the edge would be late.
_MARGIN = 1.25
_MOST_DRAG = 3.0
# A caller who leaves sooner than one batch can be run after another did not leave for the wait.
_LEAST_BATCHES = 3


class Forecast:
    """Predictions from what was launched.

    Waiting elements are given as the ledger keeps them: ``ahead[lane][priority]``.

    Attributes:
        devices: how many run batches side by side.
        patience: of callers who left.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._elements: list[float] = []
        self._batch_s: list[float] = []
        self._weights: list[Mapping[int, float] | None] = []
        self.patience = Patience()
        self.devices = 1
        self._until_s = -math.inf
        self._drag = 1.0
        self._last: tuple[float, float] | None = None

    def add_lane(self, weights: Mapping[int, float] | None = None) -> None:
        """Predict for one more model, whose priorities have these weights, or a strict order."""
        self._weights.append(weights)
        self._seconds.append(0.0)
        self._elements.append(0.0)
        self._batch_s.append(0.0)

    def restart(self, lane: int, weights: Mapping[int, float] | None = None) -> None:
        """A lane is another model's from now on, or nobody's."""
        self._weights[lane] = weights
        self._seconds[lane] = self._elements[lane] = self._batch_s[lane] = 0.0

    def launched(self, lane: int, elements: int, seconds: float, now_s: float, *, more: bool = False) -> None:
        """Real elements of a lane were launched, in a bucket of so many seconds; `more` if others wait."""
        ratio = 1.0  # after a queue that was empty nothing is known of time lost
        if self._last is not None:
            begin_s, predicted_s = self._last
            ratio = min(max(self.devices * (now_s - begin_s) / predicted_s, 1.0), _MOST_DRAG)
        self._drag += _WEIGHT * (ratio - self._drag)
        self._last = (now_s, seconds) if more and seconds > 0 else None
        first = not self._elements[lane]
        weight = 1.0 if first else _WEIGHT
        self._seconds[lane] += weight * (seconds - self._seconds[lane])
        self._elements[lane] += weight * (elements - self._elements[lane])
        self._batch_s[lane] = seconds if first else max(seconds, (1 - _WEIGHT) * self._batch_s[lane])
        self._until_s = max(self._until_s, now_s) + seconds * self._drag / self.devices

    def landed(self, now_s: float, *, busy: bool) -> None:
        """Something came back; `busy` if more is on the device. Time predicted and not used is let go."""
        left_s = max(self._batch_s) * self._drag if busy else 0.0
        self._until_s = min(self._until_s, now_s + left_s)

    def left(self, request: Request, now_s: float) -> None:
        """The caller of a request left before its answer came."""
        self.patience.left(now_s - request.arrived_s, self._least_s(request.lane))

    def check(self, request: Request, ahead: Sequence[Sequence[int]], share: float = 1.0) -> None:
        """Refuse a request, as it arrives, that would be answered after its deadline or its caller's leaving.

        Args:
            request: the newcomer.
            ahead: what waits.
            share: of what waits in its own priority, the part that goes before it.

        Raises:
            Overloaded: with the time in which what waits will be through.
        """
        bound_s = self.patience.bound_s
        if request.deadline_s == math.inf and bound_s == math.inf:
            return
        now_s = request.arrived_s
        wait_s = self.answer_s(request.lane, request.priority, ahead, now_s, share)
        # A busy event loop took as long to read the request as it will take to hand the answer over.
        bound_s = max(bound_s, self._least_s(request.lane))
        slack_s = min(request.deadline_s - now_s, bound_s) - 2 * request.sink.lag_s
        if wait_s > slack_s:
            raise too_late(max(0.0, slack_s), wait_s, self.drain_s(ahead, now_s))

    def drain_s(self, ahead: Sequence[Sequence[int]], now_s: float) -> float:
        """Seconds until all that waits and runs is through; 1 before anything was launched."""
        if not any(self._elements):
            return _UNKNOWN_S
        total_s = self._running_s(now_s) + sum(
            self._pace(lane) * sum(waiting) for lane, waiting in enumerate(ahead)
        )
        return min(max(total_s, _LEAST_S), _MOST_S)

    def answer_s(
        self, lane: int, priority: int, ahead: Sequence[Sequence[int]], now_s: float, share: float = 1.0
    ) -> float:
        """Seconds in which a newcomer is safely answered; 0 if nothing of its lane was launched yet.

        Before it goes what is at least as urgent in its lane (or, with weights, what its own priority has,
        and of each other one as much as its weight allows meanwhile), and of each other lane as much, since
        lanes take turns.
        """
        if not self._elements[lane]:
            return 0.0
        own_s = self._pace(lane) * self._before(self._weights[lane], priority, ahead[lane], share)
        others_s = sum(
            min(own_s, self._pace(other) * sum(waiting))
            for other, waiting in enumerate(ahead)
            if other != lane
        )
        return _MARGIN * (self._running_s(now_s) + own_s + others_s + self._batch_s[lane] * self._drag)

    def _before(
        self, weights: Mapping[int, float] | None, priority: int, ahead: Sequence[int], share: float
    ) -> float:
        mine = share * ahead[priority]
        if weights is None:
            return sum(ahead[:priority]) + mine
        each = mine / weights.get(priority, 1.0)
        return sum(
            mine if other == priority else min(waiting, each * weights.get(other, 1.0))
            for other, waiting in enumerate(ahead)
        )

    def _least_s(self, lane: int) -> float:
        return _LEAST_BATCHES * self._batch_s[lane] * self._drag

    def _running_s(self, now_s: float) -> float:
        return max(0.0, self._until_s - now_s)

    def _pace(self, lane: int) -> float:
        elements = self._elements[lane]
        return self._drag * self._seconds[lane] / elements / self.devices if elements else 0.0
