"""Batching policy for one model: which waiting rows run next, in which bucket, and when.

Pure: time comes in as an argument, nothing here knows threads, devices or JAX.

Rows wait in one queue for each priority. The first of them, in the order in which they should run, are
moved to the *front*, which is planned as a whole; so the work for a launch is bounded by the front's
length, whatever waits behind it.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..bucketing import Bucket, CostModel, Planner, Run
from .errors import ConfigError
from .request import PRIORITIES, Request, Row

# Ended rows that may lie in the queues before they are swept out, however few rows wait.
_DEAD = 64


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and by what order rows wait.

    Attributes:
        max_wait_s: most seconds that an idle device waits for a batch to fill; 0 launches at once.
        max_age_s: after this many seconds a row goes before every younger one, whatever the priorities.
        window: how many of the first rows are planned together; at least the largest batch.
    """

    max_wait_s: float = 0.0
    max_age_s: float = 1.0
    window: int = 256

    def __post_init__(self) -> None:
        if not (0 <= self.max_wait_s < math.inf and 0 < self.max_age_s < math.inf and self.window >= 1):
            raise ConfigError(
                f"waits are finite seconds from 0 up, the age bound is above 0, the window at least 1; got "
                f"{self}"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows to run together now.

    Attributes:
        bucket: where they run.
        rows: at most ``bucket.rows`` rows, each of which the bucket holds.
        reason: ``full`` (waiting could not make it better), ``window`` (a row waited its time),
            ``deadline`` (a row could wait no longer) or ``idle`` (the device was free).
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
        self.cost = cost
        self._queues: dict[int, deque[Row]] = {priority: deque() for priority in PRIORITIES}
        self._front: list[Row] = []
        self._mixed = False  # whether the front holds rows of several priorities
        self._ahead: deque[tuple[Planner, Launch]] = deque()
        self._dead = 0

    def add(self, request: Request) -> None:
        """Put all rows of a request at the end of its priority's queue."""
        self._queues[request.priority].extend([Row(request, index) for index in range(len(request.items))])

    def forget(self, rows: int) -> None:
        """So many waiting rows have ended and will be skipped; swept out once they are the most."""
        self._dead += rows
        if self._dead > _DEAD and 2 * self._dead > len(self._front) + sum(map(len, self._queues.values())):
            self._dead = 0
            for priority, queue in self._queues.items():
                self._queues[priority] = deque(row for row in queue if not row.request.over)

    def next(self, now_s: float) -> Launch | float:
        """What to do with an idle device.

        Returns:
            A launch, whose rows have left the queue; or the time at which to ask again, infinity if only a
            new row or a new program can change the answer.
        """
        if self.planner is None:
            return math.inf
        launch = self._take_ahead(now_s)
        if launch is not None:
            return launch
        window = self._window(now_s, self.planner)
        if not window:
            return math.inf
        soonest_s = math.inf
        runs = self._plan(window, self.planner)
        for place, run in enumerate(runs):
            launch, start_s = self._prepare(run, window, self.planner, now_s)
            if start_s <= now_s:
                if place == 0:
                    self._look_ahead(runs, window, self.planner, now_s)
                return _taken(launch)
            soonest_s = min(soonest_s, start_s)
        return soonest_s

    def clear(self) -> list[Row]:
        """Take every waiting row out."""
        rows = [*self._front, *(row for queue in self._queues.values() for row in queue)]
        for queue in self._queues.values():
            queue.clear()
        self._front = []
        self._ahead.clear()
        return [row for row in rows if not row.taken and not row.request.over]

    def less_urgent(self, priority: int) -> Iterator[Request]:
        """Requests of lower urgency of which no row was launched: the least urgent, and youngest, first."""
        last: Request | None = None
        for lower in range(PRIORITIES[-1], priority, -1):
            for rows in (self._queues[lower], self._front):
                for row in reversed(rows):
                    request = row.request
                    if request.priority != lower or request is last or row.taken or request.over:
                        continue
                    last = request
                    if request.waiting_rows == len(request.items):
                        yield request

    def _plan(self, window: list[Row], planner: Planner) -> list[Run]:
        sizes = [row.sizes for row in window]
        # Without waiting the first run is always launched; only a full front is worth planning to its end.
        if self.policy.max_wait_s == 0 and len(window) < self._length(planner):
            return [planner.next_run(sizes)]
        return planner.plan(sizes)

    def _prepare(self, run: Run, window: list[Row], planner: Planner, now_s: float) -> tuple[Launch, float]:
        """A planned run as a launch, and from when on it may start."""
        rows = tuple([window[index] for index in run.rows])
        if self._full(run.bucket, rows, planner):
            return Launch(run.bucket, rows, "full"), now_s
        if self.policy.max_wait_s == 0:
            return Launch(run.bucket, rows, "idle"), now_s
        window_s = min(row.request.arrived_s for row in rows) + self.policy.max_wait_s
        latest_s = min(row.request.deadline_s for row in rows) - self.cost.seconds(run.bucket)
        if latest_s < window_s:
            return Launch(run.bucket, rows, "deadline"), latest_s
        return Launch(run.bucket, rows, "window"), window_s

    def _full(self, bucket: Bucket, rows: tuple[Row, ...], planner: Planner) -> bool:
        """Whether no more rows would make the run cheaper for each of them."""
        if len(rows) < bucket.rows:
            return False
        if bucket.rows == planner.grid.max_rows:
            return True
        largest = tuple(map(max, zip(*[row.sizes for row in rows], strict=True)))
        each_s = self.cost.seconds(bucket) / bucket.rows
        larger = planner.grid.candidates(bucket.rows + 1, largest)
        return all(self.cost.seconds(other) / other.rows >= each_s for other in larger)

    def _look_ahead(self, runs: list[Run], window: list[Row], planner: Planner, now_s: float) -> None:
        """Keep the runs that stay right whatever comes: full ones of a full front of one priority.

        Planning costs about 0.4 us a row of the front; with this it is paid once for many launches.
        """
        if self._mixed or len(window) < self._length(planner):
            return
        for run in runs[1:]:
            launch, _ = self._prepare(run, window, planner, now_s)
            if launch.reason != "full":
                return
            self._ahead.append((planner, launch))

    def _take_ahead(self, now_s: float) -> Launch | None:
        if not self._ahead:
            return None
        planner, launch = self._ahead.popleft()
        priority = launch.rows[0].request.priority
        if (
            planner is self.planner
            and not self._others_wait(priority)
            and all(not row.request.over and row.request.deadline_s > now_s for row in launch.rows)
        ):
            return _taken(launch)
        self._ahead.clear()
        return None

    def _window(self, now_s: float, planner: Planner) -> list[Row]:
        """The front without what ended or left, filled up again in the order in which rows should run.

        Cancelled and late rows never run; the deadline timer answers the late ones.
        """
        front = [
            row
            for row in self._front
            if not row.taken and not row.request.over and row.request.deadline_s > now_s
        ]
        if front and (self._mixed or self._others_wait(front[0].request.priority)):
            # Priorities or ages may order them anew.
            for row in reversed(front):
                self._queues[row.request.priority].appendleft(row)
            front = []
        queues = [queue for queue in self._queues.values() if queue]
        self._mixed = len(queues) > 1
        self._front = front
        most, bound_s = self._length(planner), now_s - self.policy.max_age_s
        while len(front) < most and (queue := _first(queues, bound_s)) is not None:
            row = queue.popleft()
            if not row.request.over and row.request.deadline_s > now_s:
                front.append(row)
        return front

    def _others_wait(self, priority: int) -> bool:
        return any(queue for other, queue in self._queues.items() if other != priority)

    def _length(self, planner: Planner) -> int:
        return max(self.policy.window, planner.grid.max_rows)


def _first(queues: list[deque[Row]], bound_s: float) -> deque[Row] | None:
    """The queue whose head runs first: the oldest of the aged heads, else the most urgent one."""
    if len(queues) == 1:
        return queues[0] if queues[0] else None
    heads = [queue for queue in queues if queue]
    aged = [queue for queue in heads if queue[0].request.arrived_s <= bound_s]
    if aged:
        return min(aged, key=lambda queue: queue[0].request.arrived_s)
    return heads[0] if heads else None


def _taken(launch: Launch) -> Launch:
    for row in launch.rows:
        row.taken = True
    return launch
