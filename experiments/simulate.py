"""One device under the server's own batching code, in simulated time.

A discrete-event simulation: the device is idle or runs one launch whose seconds come from a cost table.
Whenever it is idle the batcher is asked exactly as the server's device thread asks it, with the
simulated time as its argument, so what is measured here is the policy that runs in production.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..bucketing import Bucket, CostModel, Grid, Planner
from ..server.batching.batcher import Batcher, Launch, Policy
from ..server.batching.request import Request, State
from .errors import ExperimentError, Stalled


class SimulatedBatcher(Protocol):
    """What the simulation drives; `servax.server.batching.batcher.Batcher` is one."""

    def add(self, request: Request) -> None:
        """Let a request wait."""

    def next(self, now_s: float) -> Launch | float:
        """A launch for the idle device, or the time at which to ask again."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One launch: when, where, and how much of it was real."""

    start_s: float
    end_s: float
    bucket: Bucket
    rows: int
    real: int


@dataclass(frozen=True, eq=False)
class Simulated:
    """What came out.

    Args:
        arrivals_s: `(n,)` float64.
        done_s: `(n,)` float64, when each request's answer was there.
        launches: In order of start.
    """

    arrivals_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    launches: tuple[Ran, ...]

    @cached_property
    def latency_s(self) -> NDArray[np.float64]:
        """`(n,)` float64, from arrival to answer."""
        return self.done_s - self.arrivals_s

    @property
    def real(self) -> int:
        """Real elements that ran."""
        return sum(ran.real for ran in self.launches)

    @property
    def computed(self) -> int:
        """Elements of all launched buckets, padding included."""
        return sum(ran.bucket.elements for ran in self.launches)

    @property
    def waste(self) -> float:
        """1 - real / computed elements over all launches, spare rows included."""
        return 1 - self.real / self.computed if self.launches else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which the device ran something."""
        return math.fsum(ran.end_s - ran.start_s for ran in self.launches)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last answer."""
        return float(self.done_s.max() - self.arrivals_s.min()) if len(self.done_s) else 0.0

    @property
    def utilisation(self) -> float:
        """Busy seconds / span."""
        return self.busy_s / self.span_s if self.span_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Answers a second over the span."""
        return len(self.done_s) / self.span_s if self.span_s else 0.0

    @property
    def elements_per_s(self) -> float:
        """Real elements a second over the span."""
        return self.real / self.span_s if self.span_s else 0.0

    def percentiles_s(self, percents: Sequence[float] = (50, 95, 99)) -> list[float]:
        """Latencies that so many percent of the requests do not exceed, in seconds."""
        found: list[float] = np.percentile(self.latency_s, percents).tolist()
        return found

    def use(self) -> dict[Bucket, int]:
        """How often each bucket ran."""
        counts: dict[Bucket, int] = {}
        for ran in self.launches:
            counts[ran.bucket] = counts.get(ran.bucket, 0) + 1
        return counts


def grid_batcher(grid: Grid, seconds: Callable[[Bucket], float], policy: Policy | None = None) -> Batcher:
    """The server's batcher over a grid whose costs are known.

    Args:
        grid: The warm programs.
        seconds: Cost of a run; must not fall as sizes rise.
        policy: Waiting and ordering; by default the server's.
    """
    cost = CostModel(seconds)
    batcher = Batcher(cost, policy)
    batcher.planner = Planner(grid, cost, window=batcher.policy.window)
    return batcher


def simulate(
    sizes: ArrayLike,
    arrivals_s: ArrayLike,
    batcher: SimulatedBatcher,
    run_s: Callable[[Bucket], float],
    *,
    first_run_s: Callable[[Bucket], float] | None = None,
) -> Simulated:
    """Run a trace through a batcher until every request is answered.

    Args:
        sizes: `(n,)` or `(n, item axes)` integers, one row a request.
        arrivals_s: `(n,)` non-decreasing seconds.
        batcher: What decides; it must be empty.
        run_s: Seconds that the device takes for a bucket.
        first_run_s: Seconds added to the first run of each bucket, such as a compile on the request
            path; None adds nothing.

    Raises:
        ExperimentError: if shapes disagree, or arrivals fall or are not finite.
        Stalled: if the batcher leaves requests waiting with no more to come.
    """
    requests, arrivals = _requests(sizes, arrivals_s)
    place = {id(request): index for index, request in enumerate(requests)}
    done = np.full(len(requests), np.nan)
    launches: list[Ran] = []
    seen: set[Bucket] = set()
    now, arrived, left = min(arrivals, default=0.0), 0, len(requests)
    while left:
        while arrived < len(requests) and arrivals[arrived] <= now:
            batcher.add(requests[arrived])
            arrived += 1
        answer = batcher.next(now)
        if not isinstance(answer, Launch):
            upcoming = arrivals[arrived] if arrived < len(requests) else math.inf
            now = _later(now, min(answer, upcoming), left)
            continue
        cost = run_s(answer.bucket)
        if first_run_s is not None and answer.bucket not in seen:
            cost += first_run_s(answer.bucket)
            seen.add(answer.bucket)
        end = now + cost
        real = sum(math.prod(row.sizes) for row in answer.rows)
        launches.append(Ran(now, end, answer.bucket, len(answer.rows), real))
        for row in answer.rows:
            row.request.move(State.RUNNING)
            row.request.move(State.DONE)
            done[place[id(row.request)]] = end
        left -= len(answer.rows)
        now = end
    return Simulated(np.array(arrivals), done, tuple(launches))


def _later(now: float, then: float, left: int) -> float:
    if not then > now or then == math.inf:
        raise Stalled(
            f"A batcher launches, or names a later time, while requests wait; at {now:g} s it named {then:g} "
            f"with {left} requests unanswered."
        )
    return then


class Nobody:
    """The sink of simulated requests."""

    lag_s = 0.0

    def deliver(self, requests: Iterable[Request]) -> None:
        """Nobody waits for them."""


def _requests(sizes: ArrayLike, arrivals_s: ArrayLike) -> tuple[list[Request], list[float]]:
    table = np.asarray(sizes)
    table = table[:, None] if table.ndim == 1 else table
    arrivals = np.asarray(arrivals_s, np.float64)
    if table.ndim != 2 or arrivals.shape != (len(table),):
        raise ExperimentError(
            f"Sizes have the shape (n, axes) and arrivals (n,); got {table.shape} and {arrivals.shape}."
        )
    if not np.isfinite(arrivals).all() or (np.diff(arrivals) < 0).any():
        raise ExperimentError("Arrivals are finite and do not fall; sort the trace by arrival.")
    sink = Nobody()
    nothing: tuple[dict[str, np.ndarray], ...] = ({},)
    requests = [
        Request(nothing, [tuple(row)], arrived_s=at, sink=sink)
        for row, at in zip(table.tolist(), arrivals.tolist(), strict=True)
    ]
    return requests, arrivals.tolist()
