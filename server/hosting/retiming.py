"""Second timings: at the end of a warm-up, when nothing compiles any more, programs are timed once more.

A time is spoilt upwards far more often than downwards: a neighbour was busy, another program was compiled, a
first run paid for its buffers. A bucket that seems dear is not chosen, so traffic does not correct it, and
the store hands the error on. So each is timed again some seconds after its first runs, in rounds over all
buckets and not at one go, until two of its times agree; the least counts.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from ...bucketing import Bucket
from ...jit_cache import Program
from ..errors import Closed
from .model import Model

_log = logging.getLogger(__name__)
_ROUNDS = 3
# Two times agree that differ by so much; of a short run the clock and the interpreter take the rest.
_ALIKE, _NOISE_S = 0.05, 50e-6
_DEARER = 0.1
# Seconds it may take at most: a fraction of the warm-up before it, or this where that was short.
_SHARE, _LEAST_S = 0.05, 1.0


def implausible(seconds: Mapping[Bucket, float]) -> set[Bucket]:
    """Buckets that a better time is expected of.

    They take longer, by a tenth, than a bucket that contains them, or than several runs of one with fewer
    rows that hold as much.

    Args:
        seconds: of one run of each; of one model.
    """
    buckets = list(seconds)
    sizes = np.array([bucket.sizes for bucket in buckets])
    rows, items = sizes[:, 0], sizes[:, 1:]
    taken = np.array([seconds[bucket] for bucket in buckets])
    within = (items[:, None] <= items).all(-1)
    larger, alike = within & (rows[:, None] <= rows), within & within.T
    runs = np.where(larger | alike, np.ceil(rows[:, None] / rows), math.inf)
    odd = taken > (1 + _DEARER) * (runs * taken).min(axis=1) + _NOISE_S
    return {bucket for bucket, is_odd in zip(buckets, odd.tolist(), strict=True) if is_odd}


class Timings:
    """Seconds of the runs of each bucket, and which of them are to be timed again.

    Args:
        first: of one run of each bucket, as it is known so far.
        fresh: those that this start timed. The others are known from an earlier start, and are believed as
            long as they are plausible.
    """

    def __init__(self, first: Mapping[Bucket, float], fresh: Collection[Bucket]) -> None:
        self._times = {bucket: [seconds] for bucket, seconds in first.items() if seconds > 0}
        self._fresh = frozenset(fresh)

    def add(self, bucket: Bucket, seconds: float) -> None:
        """One more run."""
        self._times[bucket].append(seconds)

    def least(self, bucket: Bucket) -> float:
        """Seconds of its fastest run."""
        return min(self._times[bucket])

    def doubted(self) -> list[Bucket]:
        """What the next round is to time, the implausible ones first; otherwise in the order of `first`."""
        if len(self._times) < 2:  # nothing is chosen among less
            return []
        odd = implausible({bucket: min(times) for bucket, times in self._times.items()})
        left = [one for one in self._times if (one in odd or one in self._fresh) and not self._agreed(one)]
        return sorted(left, key=lambda bucket: bucket not in odd)

    def _agreed(self, bucket: Bucket) -> bool:
        best, *more = sorted(self._times[bucket])
        return bool(more) and more[0] <= (1 + _ALIKE) * best + _NOISE_S


def time_again(
    model: Model,
    buckets: Collection[Bucket],
    run: Callable[[Program], float],
    *,
    now_s: Callable[[], float],
    begin_s: float,
    go_on: Callable[[], bool],
) -> None:
    """Time programs of a warm-up again, and remember what is better known then; blocks.

    It takes a twentieth of the warm-up's time at most, or a second where that was short; programs that are
    believed to take longer than what is left of it are left out.

    A run that fails ends it, with a warning: the first timings stay.

    Args:
        model: whose.
        buckets: those whose warm-up just came to its end; the others are believed as long as they are
            plausible.
        run: times a program once on the device thread, from where on it is planned with what that took if it
            is less; its seconds.
        now_s: the time.
        begin_s: when the warm-up of the buckets began.
        go_on: asked before each run.
    """
    first = {one.bucket: one.run_s for one in model.report.warm if isinstance(one.bucket, Bucket)}
    known = {one.bucket for one in model.report.warm if one.facts.run_s is not None}
    timings = Timings(first, [one for one in first if one in buckets and one not in known])
    until_s = now_s() + max(_LEAST_S, _SHARE * (now_s() - begin_s))
    try:
        for _ in range(_ROUNDS):
            for bucket in timings.doubted():
                program = model.cache.find(bucket)
                if program is None or now_s() + timings.least(bucket) > until_s:
                    continue
                if not go_on():
                    return
                timings.add(bucket, run(program))
    except Closed:  # the server ends
        pass
    except Exception as error:  # isolated: what is warm goes on serving
        _log.warning("%s: its programs were not timed a second time: %s", model.name, error)
    finally:
        _remember(model, timings, first)


def _remember(model: Model, timings: Timings, first: Mapping[Bucket, float]) -> None:
    """For the report, and for starts to come."""
    warm = model.report.warm
    for place, one in enumerate(warm):
        bucket = one.bucket
        if not isinstance(bucket, Bucket) or bucket not in first or first[bucket] <= 0:
            continue
        program, seconds = model.cache.find(bucket), timings.least(bucket)
        if program is not None and seconds < first[bucket]:
            warm[place] = replace(one, run_s=seconds)
            model.maker.learned(program, seconds)
