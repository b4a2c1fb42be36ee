"""Batching policy for one model: which waiting rows run next, in which bucket, and when.

Pure: time comes in as an argument, nothing here knows threads, devices or JAX.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...bucketing import Bucket, CostModel, Planner, Run
from ..errors import ConfigError
from .adaptive import AdaptiveWait, RowCosts
from .line import Line
from .pins import pinned_rows
from .request import Request, Row
from .shares import check_weights
from .together import apart, run_in

# Batches planned at once where clients take turns; two cost up to 10 % of device time, four 2 %.
_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and by what order rows wait.

    Attributes:
        max_wait_s: most seconds that an idle device waits for a batch to fill; 0 launches at once.
        wait: ``"fixed"`` always waits that long, from the arrival of a row; ``"adaptive"`` only as long as
            that is predicted to pay, from when the device was free.
        max_age_s: after this many seconds a row goes before every younger one, whatever the priorities.
        window: how many of the first rows are planned together; at least the largest batch.
        weights: shares of the device's time by priority, such as ``{1: 8, 5: 2}``; those not named have 1.
            None for strict order: a lower number always goes first, but for the age bound.
        fair: whether clients of one priority take turns.
    """

    max_wait_s: float = 0.0
    wait: str = "fixed"
    max_age_s: float = 1.0
    window: int = 256
    weights: Mapping[int, float] | None = None
    fair: bool = False

    def __post_init__(self) -> None:
        check_weights(self.weights or {})
        if self.wait not in ("fixed", "adaptive"):
            raise ConfigError(f"wait is 'fixed' or 'adaptive'; got {self.wait!r}: name one of them")
        if not (0 <= self.max_wait_s < math.inf and 0 < self.max_age_s < math.inf and self.window >= 1):
            raise ConfigError(
                f"waits are finite seconds from 0 up, the age bound is above 0, the window at least 1; got "
                f"{self}"
            )
        if self.wait == "adaptive" and not self.max_wait_s:
            raise ConfigError(
                "an adaptive wait needs a bound above 0; got max_wait_ms 0: set it to the most that one "
                "request may wait for others"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows to run together now.

    Attributes:
        bucket: where they run.
        rows: at most ``bucket.rows`` rows, each of which the bucket holds.
        reason: ``full`` (waiting could not make it better), ``window`` (a row waited its time),
            ``deadline`` (a row could wait no longer) or ``idle`` (the device was free, and no wait was wanted
            or worth more).
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
        self._line = Line(self.policy.max_age_s, self.policy.weights, fair=self.policy.fair)
        adaptive = self.policy.wait == "adaptive"
        self._wait = AdaptiveWait(self.policy.max_wait_s) if adaptive else None
        self._row_costs = RowCosts(cost)
        self._ahead: deque[tuple[Planner, Launch]] = deque()
        self._known: tuple[Planner | None, int] = (None, 0)
        self._best: dict[Bucket, bool] = {}
        self._apart = False
        self._honest: tuple[tuple[Planner, int], Planner] | None = None

    def add(self, request: Request) -> None:
        """Let all rows of a request wait."""
        self._apart |= request.pin is not None or request.together is not None
        if self._wait is not None:
            self._wait.came(request.arrived_s, request.sizes)
        self._line.add(request)

    def forget(self, rows: int) -> None:
        """So many waiting rows have ended."""
        self._line.forget(rows)

    def less_urgent(self, priority: int) -> Iterator[Request]:
        """Requests of lower urgency of which no row was launched: the least urgent, and youngest, first."""
        return self._line.less_urgent(priority)

    def clear(self) -> list[Row]:
        """Take every waiting row out."""
        self._ahead.clear()
        return self._line.clear()

    def next(self, now_s: float) -> Launch | float:
        """What to do with an idle device.

        Returns:
            A launch, whose rows have left the queue; or the time at which to ask again, infinity if only a
            new row or a new program can change the answer.
        """
        planner = self.planner  # read once: another thread lets it go when the model leaves
        if planner is None:
            return math.inf
        launch = self._take_ahead(planner, now_s)
        if launch is not None:
            return launch
        most = self._most(planner)
        window = self._line.front(now_s, most, min(most, _BATCHES * planner.grid.max_rows))
        if not window:
            return math.inf
        planned: Launch | None = None
        if self._apart:
            first = window[0]
            if first.request.pin is not None:
                bucket, rows = pinned_rows(window, planner.grid, alone=not planner.exchanges)
                reason = "full" if len(rows) == bucket.rows else "idle"
                return self._taken(Launch(bucket, tuple(rows), reason))
            window, planned = self._without_runs(window, planner, now_s)
            if planned is not None and (planned.rows[0] is first or not window):
                return self._taken(planned)
        if self._wait is not None:
            self._wait.asked(now_s, len(window))
        soonest_s = math.inf
        runs = self._plan(window, planner)
        if any(self._hopes_too_much(run, window, now_s) for run in runs):
            runs = self._plan(window, self._without_hope(planner))
        for place, run in enumerate(runs):
            launch, start_s = self._prepare(run, window, planner, now_s, alone=len(runs) == 1)
            if start_s <= now_s:
                if place == 0:
                    self._look_ahead(runs, window, planner, now_s)
                elif planner.exchanges:
                    launch = self._oldest_first(launch, run, window, planner, now_s)
                return self._taken(launch)
            soonest_s = min(soonest_s, start_s)
        return soonest_s if planned is None else self._taken(planned)

    def _without_runs(
        self, window: list[Row], planner: Planner, now_s: float
    ) -> tuple[list[Row], Launch | None]:
        """The rows to be planned now, and the first run that was planned before, if all of it is there."""
        rows = run_in(window, planner)
        if rows and len(rows) < rows[0].request.waiting_rows and not self.policy.fair:
            window = self._line.front(now_s, len(window) + rows[0].request.waiting_rows)
            rows = run_in(window, planner)
        launch = None
        if rows and (run := rows[0].request.together) is not None:
            if len(rows) == rows[0].request.waiting_rows:
                launch = Launch(run.bucket, rows, "full")
            elif rows[0] is window[0]:
                rows[0].request.together = None
        others = [row for row in window if row.request.pin is None and not apart(row, planner)]
        self._apart = len(others) < len(self._line)
        return others, launch

    def _plan(self, window: list[Row], planner: Planner) -> list[Run]:
        sizes = [row.sizes for row in window]
        # Without waiting the first run is always launched; the others are of use only where looking ahead is.
        if self.policy.max_wait_s == 0 and not self._may_look_ahead(window, planner):
            return [planner.next_run(sizes)]
        return planner.plan(sizes)

    def _hopes_too_much(self, run: Run, window: list[Row], now_s: float) -> bool:
        """Whether a bucket that was hardly tried may make a row late; no deadline pays for a trial."""
        if not self.cost.hopes(run.bucket):
            return False
        until_s = now_s + self.cost.seconds(run.bucket)
        return any(window[index].request.deadline_s < until_s for index in run.rows)

    def _without_hope(self, planner: Planner) -> Planner:
        known = (planner, self.cost.version)
        if self._honest is None or self._honest[0] != known:
            self._honest = known, planner.with_cost(self.cost.seconds)
        return self._honest[1]

    def _prepare(
        self, run: Run, window: list[Row], planner: Planner, now_s: float, *, alone: bool = False
    ) -> tuple[Launch, float]:
        """A planned run as a launch, and from when on it may start; `alone` if no other is planned."""
        rows = tuple([window[index] for index in run.rows])
        if planner.full(run.bucket, [row.sizes for row in rows]) and self._best_full(run.bucket, planner):
            return Launch(run.bucket, rows, "full"), now_s
        if self.policy.max_wait_s == 0:
            return Launch(run.bucket, rows, "idle"), now_s
        begin_s = min(row.request.arrived_s for row in rows)
        window_s = (
            begin_s if self._wait is None else max(begin_s, self._wait.idle_s)
        ) + self.policy.max_wait_s
        latest_s = min(row.request.deadline_s for row in rows) - self.cost.seconds(run.bucket)
        reason, start_s = ("deadline", latest_s) if latest_s < window_s else ("window", window_s)
        if self._wait is not None and start_s > now_s:
            # Beside another run the device does not idle: the first starts, and rows gather meanwhile.
            costs = self._row_costs.of(rows, self._wait.recent, planner) if alone else None
            until_s = now_s if costs is None else self._wait.until_s(len(rows), costs, start_s)
            if until_s < start_s:
                return Launch(run.bucket, rows, "idle"), until_s
        return Launch(run.bucket, rows, reason), start_s

    def _oldest_first(
        self, launch: Launch, run: Run, window: list[Row], planner: Planner, now_s: float
    ) -> Launch:
        """A launch before its turn: rows that need not go now give way to older ones that pad the same."""
        rungs = [planner.grid.rungs(axis) for axis in planner.grid.item_axes]
        cells = [tuple(map(bisect_left, rungs, row.sizes)) for row in window]
        until_s = now_s + self.cost.seconds(run.bucket)
        chosen = {
            index
            for index in run.rows
            if window[index].request.arrived_s + self.policy.max_wait_s <= now_s
            or window[index].request.deadline_s <= until_s
        }
        needed = Counter([cells[index] for index in run.rows])
        needed.subtract([cells[index] for index in chosen])
        for index, cell in enumerate(cells):
            if needed[cell] and index not in chosen:
                needed[cell] -= 1
                chosen.add(index)
        return Launch(launch.bucket, tuple([window[index] for index in sorted(chosen)]), launch.reason)

    def _best_full(self, bucket: Bucket, planner: Planner) -> bool:
        """Whether no bucket with more rows is cheaper for each row than this one when full."""
        if self._known != (planner, self.cost.version):
            self._known, self._best = (planner, self.cost.version), {}
        best = self._best.get(bucket)
        if best is None:
            each_s = self.cost.seconds(bucket) / bucket.rows
            larger = planner.grid.candidates(bucket.rows + 1, bucket.item_sizes)
            best = all(self.cost.seconds(other) / other.rows >= each_s for other in larger)
            self._best[bucket] = best
        return best

    def _look_ahead(self, runs: list[Run], window: list[Row], planner: Planner, now_s: float) -> None:
        """Keep the runs that stay right whatever comes: full ones of a full front of one priority.

        Planning costs about 0.4 us a row of the front; with this it is paid once for many launches.
        """
        if not self._may_look_ahead(window, planner):
            return
        for run in runs[1:]:
            launch, _ = self._prepare(run, window, planner, now_s)
            if launch.reason != "full":
                return
            self._ahead.append((planner, launch))

    def _may_look_ahead(self, window: list[Row], planner: Planner) -> bool:
        return not self._line.mixed and len(window) >= self._most(planner)

    def _most(self, planner: Planner) -> int:
        return max(self.policy.window, planner.grid.max_rows)

    def _take_ahead(self, planner: Planner, now_s: float) -> Launch | None:
        if not self._ahead:
            return None
        planned, launch = self._ahead.popleft()
        priority = launch.rows[0].request.priority
        if (
            planned is planner
            and not self._line.others_wait(priority)
            and all(not row.request.over and row.request.deadline_s > now_s for row in launch.rows)
        ):
            return self._taken(launch)
        self._ahead.clear()
        return None

    def _taken(self, launch: Launch) -> Launch:
        for row in launch.rows:
            row.taken = True
        if self._wait is not None:
            self._wait.launched()
        self._line.charge(launch.rows, self.cost.seconds(launch.bucket))
        return launch
