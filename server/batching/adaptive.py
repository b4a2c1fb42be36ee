"""Whether an idle device should wait for more rows, by what that saves and how soon they are expected.

With n rows waiting and c(n) the seconds of a run of n, to wait T seconds for k more costs the n rows
T + c(n + k) - c(n) each, and gives each of the k the difference between the end of a run of their own, behind
the one that would start now, and that of the joint run: c(n) + c(k) - T - c(n + k). The device waits if for
some k the sum over all n + k rows is a gain. Sums of latencies decide and not saved device seconds: on
Poisson arrivals a device that never waits is within 3 % of the best threshold (the control limits of Deb and
Serfozo, "Optimal control of batch service queues", 1973), so only foreseeable arrivals are worth a wait
(experiments, waiting).

Foreseeable are those of clients that ask again when they are answered. The mean rate does not show them, so
the time until the next row is learned for each number of waiting rows, from the moment the choice was made:
eight such clients come back at once after a run, and the device learns to wait for the eighth and not for a
ninth. Rows that come while a run goes on would have come in a wait as well; so every arrival teaches.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...bucketing import CostModel, Planner
from .request import Row

# A change of traffic is followed within some five arrivals; one gap out of the ordinary moves it a little.
_WEIGHT = 0.25
# A gain below this share of the run is noise of the estimates: without it Poisson arrivals lose 1 to 3 %.
_MARGIN = 0.05
# A gap counts at most as twice the longest that can matter, so that a night's pause is soon forgotten.
_FAR = 2.0
_RECENT = 8
_SIZES = 512

Sizes = tuple[int, ...]


class Costs(NamedTuple):
    """Seconds of a run by its number of rows, from 0; as long as a bucket holds so many.

    Attributes:
        now: of the rows that wait.
        alone: of newcomers.
        joined: of both together.
    """

    now: Sequence[float]
    alone: Sequence[float]
    joined: Sequence[float]


class AdaptiveWait:
    """Learns when rows come and says until when to wait for more. Pure; time is an argument.

    Args:
        max_wait_s: most seconds that rows wait on an idle device.

    Attributes:
        idle_s: since when the device is free and rows wait.
        recent: sizes of the last rows that came.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._far_s = _FAR * max_wait_s
        self._gaps: dict[int, float] = {}
        self._gap_s = math.inf
        self._since_s = math.inf
        self._level = self._limit = 0
        self._launched = True
        self.idle_s = -math.inf
        self.recent: deque[Sizes] = deque(maxlen=_RECENT)

    def came(self, now_s: float, sizes: Sequence[Sizes]) -> None:
        """Rows of these sizes came together."""
        self.recent.extend(sizes[-_RECENT:])
        if self._since_s < math.inf:
            gap_s = max(0.0, now_s - self._since_s)
            for level in range(self._level, min(self._level + len(sizes), self._limit)):
                self._learn(level, gap_s)
                gap_s = 0.0
            self._since_s = max(self._since_s, now_s)
        self._level += len(sizes)

    def asked(self, now_s: float, rows: int) -> None:
        """A free device looks at so many waiting rows."""
        if self._launched:
            silence_s = now_s - self._since_s  # of at least so long nobody came, which teaches too
            if self._level < self._limit and silence_s > self._gap(self._level):
                self._learn(self._level, silence_s)
            self._since_s = self.idle_s = now_s
            self._launched = False
        self._level = rows

    def launched(self) -> None:
        """Rows were launched; the next look begins a new silence."""
        self._launched = True

    def until_s(self, rows: int, costs: Costs, bound_s: float) -> float:
        """Until when to wait for a next row; minus infinity, or a time that has passed, to launch now.

        Args:
            rows: that wait.
            costs: of their run, now and with more.
            bound_s: when they must go in any case.
        """
        now, alone, joined = costs
        if not 0 < rows < len(now):
            return -math.inf
        run_s = now[rows]
        self._limit = len(joined)
        self._far_s = _FAR * min(self._max_wait_s, run_s)
        longest_s = min(run_s, bound_s - self._since_s)
        best_s, wait_s = 0.0, 0.0
        for more in range(1, min(len(alone), len(joined) - rows)):
            wait_s += self._gap(rows + more - 1)
            if wait_s > longest_s:
                break
            later_s = wait_s + joined[rows + more] - run_s
            gain_s = more * (alone[more] - later_s) - rows * later_s
            best_s = max(best_s, gain_s / (rows + more))
        if best_s <= _MARGIN * run_s:
            return -math.inf
        # The gain is spent after so much more silence.
        return min(bound_s, self._since_s + self._gap(rows) + best_s)

    def _gap(self, rows: int) -> float:
        return self._gaps.get(rows, self._gap_s)

    def _learn(self, rows: int, gap_s: float) -> None:
        gap_s = min(gap_s, self._far_s)
        known_s = self._gap(rows)
        self._gaps[rows] = gap_s if known_s == math.inf else known_s + _WEIGHT * (gap_s - known_s)
        self._gap_s = gap_s if self._gap_s == math.inf else self._gap_s + _WEIGHT * (gap_s - self._gap_s)


class RowCosts:
    """Seconds of runs by their number of rows, remembered as long as a planner and its costs stay.

    Args:
        cost: of buckets; asked for what it knows and not for what it hopes.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: tuple[Planner | None, int] = (None, 0)
        self._lists: dict[Sizes, list[float]] = {}

    def of(self, rows: Sequence[Row], recent: Sequence[Sizes], planner: Planner) -> Costs:
        """Of these rows, of newcomers as large as those that came lately, and of both.

        Rows that are padded cost what the largest of them does, packed ones what they do on average.
        """
        sizes = [row.sizes for row in rows]
        if planner.exchanges:
            mine, theirs = _largest(sizes), _largest(recent)
            both = _largest((mine, theirs))
        else:
            mine = theirs = both = _mean([*sizes, *recent])
        return Costs(*[self._seconds(one, planner) for one in (mine, theirs, both)])

    def _seconds(self, sizes: Sizes, planner: Planner) -> list[float]:
        if self._known != (planner, self._cost.version) or len(self._lists) > _SIZES:
            self._known, self._lists = (planner, self._cost.version), {}
        found = self._lists.get(sizes)
        if found is None:
            found = self._lists[sizes] = [0.0]
            buckets = planner.grid.candidates(1, sizes)
            for seconds, most in sorted(
                (self._cost.seconds(bucket), planner.most_rows(bucket, sizes)) for bucket in buckets
            ):
                found += [seconds] * (most + 1 - len(found))
        return found


def _largest(sizes: Sequence[Sizes]) -> Sizes:
    return tuple(map(max, zip(*sizes, strict=True)))


def _mean(sizes: Sequence[Sizes]) -> Sizes:
    return tuple(max(1, math.ceil(sum(axis) / len(sizes))) for axis in zip(*sizes, strict=True))
