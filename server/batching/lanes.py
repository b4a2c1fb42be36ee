"""The lanes of a dispatcher, one for each model: who comes gets one, and who leaves gives it back."""

from collections import deque

from ...bucketing import CostModel
from .batcher import Batcher
from .devices import Devices
from .standing import Standing
from .turns import Turns
from .work import Job, LetGo


class Lanes(Standing):
    """The part of a dispatcher that knows its models by index; its lock guards all of it."""

    _lanes: list[Batcher]
    _free: list[int]
    _leaving: set[int]
    _turns: Turns
    _jobs: deque[Job]
    _devices: Devices

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
        """Serve a model no more if nothing of it waits or runs; whether that was so.

        If not, a device thread is handed a `LetGo` once the last row that waits ends without having run.
        """
        with self._lock:
            if self._ledger.waiting[lane] or self._ledger.running[lane]:
                self._leaving.add(lane)
                return False
            self._leaving.discard(lane)
            self._lanes[lane] = Batcher(CostModel(), self._lanes[lane].policy)
            self._forecast.restart(lane)
            self._free.append(lane)
            return True

    def _emptied(self, lane: int) -> None:
        """Rows of a lane left the queue without a launch; an idle device thread would not notice."""
        if lane in self._leaving and not (self._ledger.waiting[lane] or self._ledger.running[lane]):
            self._leaving.discard(lane)
            self._jobs.append(LetGo())
            self._devices.wake(unable_too=not self._devices.able)
