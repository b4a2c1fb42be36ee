"""What landed batches teach: costs, traffic, and whoever wants to know of each. Device thread only.

It is learned while the device runs the next batch, or after a moment of rest: done at once it would keep the
device waiting, and on an idle server the interpreter from the thread that writes the answer (0.1 ms of the
1.5 ms that a request of one row spends outside the device).
"""

import logging
import math
import threading
from collections.abc import Callable

from .batch import Batch, BatchRecord
from .sinks import LoopSink

_log = logging.getLogger(__name__)


class Lessons:
    """Batches that landed and were not learned from yet.

    Args:
        turn: held while something is learned.
        on_batch: told of each batch; None tells nobody.

    Attributes:
        free_s: since when the device had nothing to do, before what landed last.
    """

    def __init__(self, turn: "threading.RLock", on_batch: Callable[[BatchRecord], None] | None) -> None:
        self._turn, self._on_batch = turn, on_batch
        self._left: list[tuple[Batch, float, float]] = []
        self.free_s = -math.inf

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def loops_wait(self) -> bool:
        """Whether an event loop is being told of the answers of one of them."""
        return any(
            batch.rows and isinstance(batch.rows[0].request.sink, LoopSink) for batch, *_ in self._left
        )

    def add(self, batch: Batch, begin_s: float, seconds: float) -> None:
        """A batch landed that began then and took so many seconds."""
        alone_s = seconds - max(0.0, self.free_s - begin_s)
        self.free_s = begin_s + seconds
        self._left.append((batch, seconds, alone_s))

    def learn(self) -> None:
        """Learn from all of them."""
        left, self._left = self._left, []
        for batch, seconds, alone_s in left:
            with self._turn:
                if batch.model.traffic is not None:
                    batch.model.traffic.add([row.sizes for row in batch.rows], batch.launched_s)
                if alone_s > 0:
                    # With several in flight the device had the batch before to do first.
                    batch.model.cost.observe(batch.bucket, alone_s)
                self._tell(batch, seconds)

    def _tell(self, batch: Batch, seconds: float) -> None:
        if self._on_batch is not None:
            try:
                self._on_batch(batch.record(seconds))
            except Exception:  # somebody else's code; it may cost a number, but not the loop
                _log.exception("on_batch failed")
