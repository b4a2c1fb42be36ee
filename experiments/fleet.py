"""Many replicas behind a router, in simulated time: each asks the server's own batcher what to run.

The single device of `simulate` many times over, with what only a fleet has: a router that chooses a replica
for each request, replicas that crash, hang or join later, and an autoscaler that decides on what it last saw.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bucketing import Bucket
from ..server.batching.batcher import Batcher, Launch
from ..server.batching.request import Request, State
from .errors import Stalled
from .simulate import Nobody

_PATIENCE_S = 3600.0
_NOTHING: tuple[dict[str, NDArray[np.int64]], ...] = ({},)


class Replica:
    """One device with its queue.

    Args:
        make: an empty batcher; once more after a crash.
        band: which lengths it is meant for.

    Attributes:
        up: whether the router may choose it.
        held: length of each request that waits or runs here, by its place in the trace.
        load: their elements.
        busy_s: seconds in which it ran something.
        computed: elements of what it ran, padding included.
    """

    def __init__(self, make: Callable[[], Batcher], band: int = 0) -> None:
        self.make, self.band = make, band
        self.up = True
        self.batcher = make()
        self.held: dict[int, int] = {}
        self.load = self.computed = self.epoch = 0  # an event of an earlier epoch is void
        self.busy_s = 0.0
        self.free_s = -math.inf
        self.running: Launch | None = None


class Router(Protocol):
    """Chooses a replica."""

    def pick(self, length: int, up: Sequence[Sequence[Replica]], draw: Callable[[], float]) -> Replica:
        """The replica for a request of this length.

        Args:
            length: of the request.
            up: the replicas of each band that are up.
            draw: gives a uniform number from 0 to 1 at each call.
        """


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls a replica.

    Args:
        at_s: When.
        replica: Which.
        kind: `crash`: its requests go elsewhere and it is gone; `hang`: it stays and finishes nothing.
        seconds: For how long.
    """

    at_s: float
    replica: int
    kind: Literal["crash", "hang"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Adds replicas as KEDA does on our two metrics: busy devices and waiting rows.

    Args:
        interval_s: Between two decisions, each on the interval before it.
        target: Busy share of a device that is aimed at.
        start_s: From a decision until a new replica takes requests.
        waiting: Rows that may wait at each replica; None leaves the queue out of it.
    """

    interval_s: float
    target: float
    start_s: float
    waiting: int | None = None


@dataclass(frozen=True, eq=False)
class FleetRun:
    """What came out.

    Args:
        arrivals_s: `(n,)` float64.
        done_s: `(n,)` float64, when each answer was there.
        real: Real elements.
        computed: Elements that devices ran, padding included.
        moved: Requests that a crash sent to another replica.
        joined_s: When each replica that the autoscaler added took its first request, rising.
    """

    arrivals_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    real: int
    computed: int
    moved: int
    joined_s: tuple[float, ...]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """`(n,)` float64, from arrival to answer."""
        return self.done_s - self.arrivals_s

    @property
    def waste(self) -> float:
        """1 - real / computed elements; what a crash threw away counts as waste."""
        return 1 - self.real / self.computed


class Fleet:
    """Runs a trace through replicas until every request is answered; used once.

    Args:
        replicas: At the start.
        router: Chooses.
        run_s: Seconds of a bucket.
        seed: Of what the router draws.
        faults: What befalls whom.
        autoscaler: Adds replicas like the first; None adds none.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        run_s: Callable[[Bucket], float],
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._replicas, self._router, self._run_s = list(replicas), router, run_s
        self._autoscaler = autoscaler
        self._draw = _uniform(seed).__next__
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._busy_before, self._coming, self._moved = 0.0, 0, 0
        self._joined: list[float] = []
        self._refresh()
        for fault in faults:
            self._at(fault.at_s, lambda now, fault=fault: self._strike(fault, now))  # type: ignore[misc]

    def run(self, lengths: NDArray[np.int64], arrivals_s: NDArray[np.float64]) -> FleetRun:
        """Answer every request.

        Args:
            lengths: `(n,)` int64.
            arrivals_s: `(n,)` float64, not falling.

        Raises:
            Stalled: if requests stay unanswered for an hour after the last one came.
        """
        arrivals = arrivals_s.tolist()
        self._arrivals, self._left = arrivals, len(arrivals)
        self._done = np.full(len(arrivals), np.nan)
        if self._autoscaler is not None:
            self._at(arrivals[0] + self._autoscaler.interval_s, self._scale)
        for place, (length, at) in enumerate(zip(lengths.tolist(), arrivals, strict=True)):
            self._until(at)
            self._route(place, length, at)
        while self._left:
            if not self._events or self._events[0][0] > arrivals[-1] + _PATIENCE_S:
                raise Stalled(f"A fleet answers every request; {self._left} are left with nothing to come.")
            self._until(self._events[0][0])
        computed = sum(one.computed for one in self._replicas)
        joined = tuple(self._joined)
        return FleetRun(np.array(arrivals), self._done, int(lengths.sum()), computed, self._moved, joined)

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            at, _, act = heapq.heappop(self._events)
            act(at)

    def _refresh(self) -> None:
        bands = max(one.band for one in self._replicas) + 1
        self._up = [[one for one in self._replicas if one.up and one.band == band] for band in range(bands)]

    def _route(self, place: int, length: int, now: float) -> None:
        replica = self._router.pick(length, self._up, self._draw)
        replica.held[place] = length
        replica.load += length
        request = Request(_NOTHING, [(length,)], arrived_s=self._arrivals[place], sink=_NOBODY, future=place)
        replica.batcher.add(request)
        if replica.running is None:
            self._ask(replica, now)

    def _ask(self, replica: Replica, now: float) -> None:
        """Let an idle replica launch, or wake it when it said."""
        answer = replica.batcher.next(now)
        replica.epoch += 1
        epoch = replica.epoch
        if not isinstance(answer, Launch):
            if answer < math.inf:
                self._at(answer, lambda at: self._ask(replica, at) if replica.epoch == epoch else None)
            return
        seconds = self._run_s(answer.bucket)
        replica.running, replica.free_s = answer, max(now, replica.free_s) + seconds
        replica.busy_s += seconds
        replica.computed += answer.bucket.elements
        self._at(replica.free_s, lambda at: self._end(replica, epoch, at))

    def _end(self, replica: Replica, epoch: int, now: float) -> None:
        if replica.epoch != epoch or replica.running is None:
            return
        if replica.free_s > now:  # it hung meanwhile
            self._at(replica.free_s, lambda at: self._end(replica, epoch, at))
            return
        for row in replica.running.rows:
            row.request.move(State.RUNNING)
            row.request.move(State.DONE)
            replica.load -= replica.held.pop(row.request.future)
            self._done[row.request.future] = now
        self._left -= len(replica.running.rows)
        replica.running = None
        self._ask(replica, now)

    def _strike(self, fault: Fault, now: float) -> None:
        replica = self._replicas[fault.replica]
        if fault.kind == "hang":
            replica.free_s = max(replica.free_s, now) + fault.seconds
            return
        held, replica.held = replica.held, {}
        replica.up, replica.load, replica.running = False, 0, None
        replica.epoch += 1
        replica.batcher = replica.make()
        self._refresh()
        self._moved += len(held)
        self._at(now + fault.seconds, lambda _: self._join(replica))
        for place, length in held.items():
            self._route(place, length, now)

    def _join(self, replica: Replica) -> None:
        replica.up, replica.free_s = True, -math.inf
        self._refresh()

    def _scale(self, now: float) -> None:
        rule = self._autoscaler
        if rule is None:
            return
        busy = sum(one.busy_s for one in self._replicas)
        wanted = (busy - self._busy_before) / rule.interval_s / rule.target
        if rule.waiting is not None:
            running = sum(len(one.running.rows) for one in self._replicas if one.running)
            waiting = sum(len(one.held) for one in self._replicas) - running
            wanted = max(wanted, waiting / rule.waiting)
        self._busy_before = busy
        have = len(self._replicas) + self._coming
        more = min(math.ceil(wanted), 2 * have) - have  # at most doubled in one step
        for place in range(max(0, more)):
            self._coming += 1
            first = self._replicas[place % len(self._replicas)]
            self._at(now + rule.start_s, lambda at, first=first: self._add(first, at))  # type: ignore[misc]
        self._at(now + rule.interval_s, self._scale)

    def _add(self, like: Replica, now: float) -> None:
        self._coming -= 1
        self._replicas.append(Replica(like.make, like.band))
        self._joined.append(now)
        self._refresh()


def _uniform(seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.random(4096).tolist()


_NOBODY = Nobody()
