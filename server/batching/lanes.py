"""The lanes of a dispatcher, one for each model: who comes gets one, and who leaves gives it back."""

from ...bucketing import CostModel
from .batcher import Batcher
from .standing import Standing
from .turns import Turns


class Lanes(Standing):
    """The part of a dispatcher that knows its models by index; its lock guards all of it."""

    _lanes: list[Batcher]
    _free: list[int]
    _turns: Turns

    def add_lane(self, batcher: Batcher) -> int:
        """Serve one more model; returns its index, which may be that of one that left."""
        with self._lock:
            if self._free:
                lane = self._free.pop()
                self._lanes[lane] = batcher
                self._forecast.restart(lane, batcher.policy.weights)
                return lane
            self._lanes.append(batcher)
            self._ledger.add_lane()
            self._forecast.add_lane(batcher.policy.weights)
            return self._turns.add()

    def drop_lane(self, lane: int) -> bool:
        """Serve a model no more if nothing of it waits or runs; whether that was so."""
        with self._lock:
            if self._ledger.waiting[lane] or self._ledger.running[lane]:
                return False
            self._lanes[lane] = Batcher(CostModel(), self._lanes[lane].policy)
            self._forecast.restart(lane)
            self._free.append(lane)
            return True
