"""Re-fit: when what arrives no longer fits the grid, a better one is made in the background and swapped in.

The decision is pure. New programs are compiled by the compile thread and timed between batches; each is used
as soon as it is there, and once all are, the grid is swapped and programs that nobody plans with any more are
let go. No request waits for any of it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ...bucketing import DriftDetector, Grid, Histogram, Ladder, fit_ladder, report
from ...jit_cache import Program
from ..errors import ConfigError
from ..logs import CHANGES

_log = logging.getLogger(__name__)
_BATCH = "batch"
_COMPILE_TIMEOUT_S = 900.0
_SWAP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class RefitPolicy:
    """When a grid is fitted anew.

    Attributes:
        interval_s: seconds between two looks.
        half_life_s: what arrived this long ago counts half.
        min_rows: (decayed) rows below which nothing is decided.
        raise_at: padding waste on some axis, 0 to 1, above which the grid counts as drifted.
        clear_at: waste below which it counts as fitting again.
        hold_s: seconds that the waste must stay above `raise_at`.
        gain: waste that the new ladders must save at least, or the old ones stay.
    """

    interval_s: float = 30.0
    half_life_s: float = 300.0
    min_rows: int = 500
    raise_at: float = 0.25
    clear_at: float = 0.15
    hold_s: float = 60.0
    gain: float = 0.05

    def __post_init__(self) -> None:
        if not (self.interval_s > 0 and self.half_life_s > 0 and self.min_rows >= 1 and 0 < self.gain < 1):
            raise ConfigError(
                f"a re-fit needs an interval and a half-life above 0, at least 1 row and a gain between 0 "
                f"and 1; got {self}"
            )
        DriftDetector(self.raise_at, self.clear_at, self.hold_s)


class Traffic:
    """Sizes of the rows that ran, by axis, fading with age. Thread-safe.

    Args:
        axes: the item axes.
        half_life_s: see `RefitPolicy`.
    """

    def __init__(self, axes: Sequence[str], half_life_s: float) -> None:
        self._lock = threading.Lock()
        self._histograms = {axis: Histogram(half_life_s) for axis in axes}

    def add(self, sizes: Iterable[Sequence[int]], now_s: float) -> None:
        """Count rows by their sizes, in the order of the axes."""
        with self._lock:
            for row in sizes:
                for histogram, size in zip(self._histograms.values(), row, strict=True):
                    histogram.add(size, now_s)

    def counts(self, now_s: float) -> dict[str, dict[int, float]]:
        """Decayed count of each size, by axis."""
        with self._lock:
            found = {axis: one.arrays(now_s) for axis, one in self._histograms.items()}
        return {
            axis: dict(zip(sizes.tolist(), counts.tolist(), strict=True))
            for axis, (sizes, counts) in found.items()
        }


@dataclass(frozen=True, slots=True)
class Proposal:
    """A better grid, and the padding waste on the worst axis with the old and with the new one."""

    grid: Grid
    waste_before: float
    waste_after: float


def propose(
    grid: Grid,
    limits: Mapping[str, int],
    counts: Mapping[str, Mapping[int, float]],
    min_rows: int = 1,
) -> Proposal | None:
    """The grid with as many rungs on each item axis as now, fitted to what arrived; batch rungs stay.

    Args:
        grid: the grid in use.
        limits: largest admissible size of each item axis; stays the last rung.
        counts: count of each size, by axis.
        min_rows: counts that must be there in all.

    Returns:
        None while too little arrived or there is no varying axis.
    """
    if not counts or min(sum(one.values()) for one in counts.values()) < min_rows:
        return None
    ladders = {_BATCH: Ladder(grid.rungs(_BATCH))}
    before, after = 0.0, 0.0
    for axis, sizes in counts.items():
        old = Ladder(grid.rungs(axis))
        new = fit_ladder(dict(sizes), len(old), limit=limits[axis])
        before = max(before, report(old, dict(sizes)).waste)
        after = max(after, report(new, dict(sizes)).waste)
        ladders[axis] = new
    most = max(bucket.elements for bucket in grid.buckets)
    return Proposal(Grid.product(ladders, max_elements=most), before, after)


class Refitter:
    """Looks at a model's traffic now and then, in a thread of its own.

    Args:
        policy: when.
        grid: the grid in use; asked at each look.
        limits: largest admissible size of each item axis.
        traffic: what arrived.
        now_s: the time.
        request: has a bucket's program made in the compile thread.
        probe: times a new program on the device thread, from where on it is planned with; blocks.
        swap: plans with a grid only and lets other programs go; returns when that is done, or raises.
        name: of the model, for the log.

    Attributes:
        swaps: grids put in place so far.
        failures: attempts that were given up.
        error: why the last attempt failed, if it did.
    """

    def __init__(
        self,
        policy: RefitPolicy,
        *,
        grid: Callable[[], Grid],
        limits: Mapping[str, int],
        traffic: Traffic,
        now_s: Callable[[], float],
        request: Callable[..., "Future[Program]"],
        probe: Callable[[Program], float],
        swap: Callable[[Grid, float], None],
        name: str = "",
    ) -> None:
        self._name = name
        self._policy, self._grid, self._limits, self._traffic = policy, grid, limits, traffic
        self._now_s, self._request, self._probe, self._swap = now_s, request, probe, swap
        self._detector = DriftDetector(policy.raise_at, policy.clear_at, policy.hold_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servax-refit", daemon=True)
        self.swaps = self.failures = 0
        self.error: Exception | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a compile under way is not waited for."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end after `stop`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        # Ends with stop(); one look in each interval.
        while not self._stop.wait(self._policy.interval_s):
            self.look()

    def look(self) -> bool:
        """Decide once, and carry it out; whether a new grid is in place."""
        proposal = self._decide()
        if proposal is None:
            return False
        try:
            self._carry_out(proposal)
        except Exception as error:  # the old grid goes on serving; the next drift tries again
            self.error = error
            self.failures += 1
            _log.warning("%s: a re-fit was given up, the grid stays: %s", self._name, error)
            return False
        finally:
            self._detector.rearm()
        self.error = None
        self.swaps += 1
        return True

    def _decide(self) -> Proposal | None:
        now_s = self._now_s()
        found = propose(self._grid(), self._limits, self._traffic.counts(now_s), self._policy.min_rows)
        if found is None or not self._detector.update(found.waste_before, now_s):
            return None
        if found.waste_before - found.waste_after < self._policy.gain:
            _log.info("waste is %.0f %%, and no other ladder is much better", 100 * found.waste_before)
            self._detector.rearm()
            return None
        return found

    def _carry_out(self, proposal: Proposal) -> None:
        known = set(self._grid())
        for bucket in proposal.grid:
            if self._stop.is_set():
                raise RuntimeError("the server is closing")
            if bucket not in known:
                self._probe(self._request(bucket).result(_COMPILE_TIMEOUT_S))
        self._swap(proposal.grid, _SWAP_TIMEOUT_S)
        CHANGES.info(
            "%s: re-fitted to its traffic: %d buckets, waste %.0f %% -> %.0f %%",
            self._name,
            len(proposal.grid),
            100 * proposal.waste_before,
            100 * proposal.waste_after,
        )
