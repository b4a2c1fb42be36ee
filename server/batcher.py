"""Batching policy for one model: which waiting rows run next, in which bucket, and when.

Pure: time comes in as an argument, nothing here knows threads, devices or JAX.
"""

import math
from collections import deque
from dataclasses import dataclass


from ..bucketing import Bucket, CostModel, Planner
from .errors import ConfigError
from .request import PRIORITIES, Request, Row


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and by what order rows wait.

    Attributes:
        max_wait_s: most seconds that an idle device waits for a batch to fill; 0 launches at once.
        max_age_s: after this many seconds a row goes before every younger one, whatever the priorities.
        window: how many of the first rows are planned together.
    """

    max_wait_s: float = 0.0
    max_age_s: float = 1.0
    window: int = 256

    def __post_init__(self) -> None:
        if not (0 <= self.max_wait_s < math.inf and 0 < self.max_age_s < math.inf and self.window >= 1):
            raise ConfigError(
                f"waits are finite seconds from 0 up, the age bound is above 0, the window at least 1; got {self}"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows to run together now.

    Attributes:
        bucket: where they run.
        rows: at most ``bucket.rows`` rows, each of which the bucket holds.
        reason: ``full``, ``window`` (waited its time), ``deadline`` (a row could wait no longer) or
            ``idle`` (the device was free).
    """

    bucket: Bucket
    rows: tuple[Row, ...]
    reason: str


class Batcher:
    """The waiting rows of one model and the choice among them.

    The planner is None until a first program is warm; rows wait meanwhile.
    """

    def __init__(self, cost: CostModel, policy: Policy | None = None) -> None:
        self.policy = policy if policy is not None else Policy()
        self.planner: Planner | None = None
        self._cost = cost
        self._queues: dict[int, deque[Row]] = {priority: deque() for priority in PRIORITIES}

    def add(self, request: Request) -> None:
        """Put all rows of a request at the end of its priority's queue."""
        self._queues[request.priority].extend(Row(request, index) for index in range(len(request.items)))

    def head_s(self) -> float:
        """When the row that waits longest arrived; infinity if none waits."""
        for queue in self._queues.values():
            while queue and queue[0].request.over:
                queue.popleft()
        return min((q[0].request.arrived_s for q in self._queues.values() if q), default=math.inf)

    def next(self, now_s: float) -> Launch | float:
        """What to do with an idle device.

        Returns:
            A launch, whose rows have left the queue; or the time at which to ask again, infinity if only a
            new row or a new program can change the answer.
        """
        if self.planner is None:
            return math.inf
        window = self._take_window(now_s)
        if not window:
            return math.inf
        run = self.planner.next_run([row.sizes for row in window])
        rows = tuple(window[index] for index in run.rows)
        reason, until_s = self._when(run.bucket, window, rows, now_s)
        if until_s > now_s:
            self._put_back(window)
            return until_s
        chosen = frozenset(run.rows)
        self._put_back([row for index, row in enumerate(window) if index not in chosen])
        return Launch(run.bucket, rows, reason)

    def clear(self) -> list[Row]:
        """Take every waiting row out."""
        rows = [row for queue in self._queues.values() for row in queue]
        for queue in self._queues.values():
            queue.clear()
        return rows

    def _when(
        self, bucket: Bucket, window: list[Row], rows: tuple[Row, ...], now_s: float
    ) -> tuple[str, float]:
        """Why and from when on the rows run."""
        if len(rows) == bucket.rows and len(window) >= bucket.rows and bucket.rows == self._most_rows(rows):
            return "full", now_s
        if self.policy.max_wait_s == 0:
            return "idle", now_s
        window_s = min(row.request.arrived_s for row in rows) + self.policy.max_wait_s
        latest_s = min(row.request.deadline_s for row in rows) - self._cost.seconds(bucket)
        return ("deadline", latest_s) if latest_s < window_s else ("window", window_s)

    def _most_rows(self, rows: tuple[Row, ...]) -> int:
        if self.planner is None:
            return 0
        largest = tuple(max(column) for column in zip(*(row.sizes for row in rows), strict=True))
        return self.planner.grid.max_rows_for(largest)

    def _take_window(self, now_s: float) -> list[Row]:
        """Take the first rows out: the aged ones by arrival, then by priority and arrival."""
        aged: list[Row] = []
        young: list[Row] = []
        bound_s = now_s - self.policy.max_age_s
        for queue in self._queues.values():
            taken = 0
            while queue and taken < self.policy.window:
                row = queue.popleft()
                if row.request.over or row.request.deadline_s <= now_s:
                    continue  # cancelled or late: never run; the deadline timer answers the late ones
                (aged if row.request.arrived_s <= bound_s else young).append(row)
                taken += 1
        aged.sort(key=lambda row: row.request.arrived_s)
        ordered = aged + young
        self._put_back(ordered[self.policy.window :])
        return ordered[: self.policy.window]

    def _put_back(self, rows: list[Row]) -> None:
        for row in reversed(rows):
            self._queues[row.request.priority].appendleft(row)
