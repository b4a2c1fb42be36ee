"""Warm-up: compile every bucket of a grid, run each once, and say what was reached.

Order: first the bucket that covers everything (whatever is admissible can be answered, if slowly), then
the others from cheap to dear, or by what they save (`servax.jit_cache.schedule`). A bucket that fails is
isolated and named; the others go on. It is an anytime schedule: wherever a budget ends it, what is warm
serves.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from ..bucketing import Bucket, Grid
from .cache import ProgramCache
from .errors import CompileError, WarmupError
from .program import Program, ProgramFacts
from .schedule import covering_bucket

# A fault of the model itself fails every bucket alike; the report holds them all.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class WarmBucket:
    """One warm bucket, or what else names a program: what the compiler said, and seconds of one run."""

    bucket: Hashable
    facts: ProgramFacts
    run_s: float


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """Progress: one more bucket is done, warm or failed.

    Attributes:
        bucket: which; or what else names a program.
        done: buckets done so far, this one included.
        total: buckets to do.
        elapsed_s: seconds since warm-up began.
        error: what went wrong, or None.
        facts: of the program, where nothing went wrong.
        failed: how many of those done so far failed.
    """

    bucket: Hashable
    done: int
    total: int
    elapsed_s: float
    error: str | None = None
    facts: ProgramFacts | None = None
    failed: int = 0


@dataclass(slots=True)
class WarmupReport:
    """What a warm-up reached so far; the caller reads it while it grows.

    Attributes:
        total: buckets to warm.
        warm: those that are, in the order in which they were warmed.
        failed: what went wrong, by bucket.
        elapsed_s: seconds since it began.
        stopped: whether it was told to end.
        enough: whether a budget ended it; what is left may follow later.
    """

    total: int
    warm: list[WarmBucket] = field(default_factory=list)
    failed: dict[Hashable, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
    stopped: bool = False
    enough: bool = False

    @property
    def complete(self) -> bool:
        """Whether every bucket is warm."""
        return len(self.warm) == self.total

    @property
    def code_bytes(self) -> int:
        """Bytes of the warm programs."""
        return sum(one.facts.code_bytes for one in self.warm)

    def left(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Those of the buckets that are neither warm nor failed, in the same order."""
        seen = {one.bucket for one in self.warm} | self.failed.keys()
        return [one for one in buckets if one not in seen]

    def require_complete(self) -> None:
        """Raise if a bucket is not warm.

        Raises:
            WarmupError: naming the first failed buckets and their errors; `failed` has all.
        """
        if self.complete:
            return
        alike = alike_failures(self.failed)
        named = [f"{where}: {error}" for where, error, _ in alike[:_NAMED]]
        if more := sum(count for _, _, count in alike[_NAMED:]):
            named.append(f"and {more} more that failed")
        failures = "; ".join(named)
        raise WarmupError(
            f"every bucket must be warm; {len(self.warm)} of {self.total} are"
            f"{' (stopped)' if self.stopped else ''}: {failures or 'none failed'}"
        )


def alike_failures(failed: Mapping[Hashable, str]) -> list[tuple[str, str, int]]:
    """Failures that differ in the bucket's name at most, together.

    Args:
        failed: what went wrong, by bucket.

    Returns:
        Of each distinct error: the bucket, or "8 buckets"; the error as the first of them says it; how many.
    """
    groups: dict[str, list[Hashable]] = {}
    for bucket, error in failed.items():
        groups.setdefault(error.replace(str(bucket), "*"), []).append(bucket)
    return [
        (str(ones[0]) if len(ones) == 1 else f"{len(ones)} buckets", failed[ones[0]], len(ones))
        for ones in groups.values()
    ]


def warmup_order(grid: Grid) -> list[Bucket]:
    """Covering bucket first, then from few elements to many."""
    covering = covering_bucket(grid)
    rest = sorted((bucket for bucket in grid.buckets if bucket != covering), key=lambda one: one.elements)
    return [covering, *rest]


def warm_up(
    cache: ProgramCache,
    buckets: Sequence[Bucket],
    probe: Callable[[Program], float],
    *,
    report: WarmupReport | None = None,
    on_step: Callable[[WarmupStep], None] | None = None,
    stop: threading.Event | None = None,
    enough: Callable[[], bool] | None = None,
    before: Callable[[], None] | None = None,
    compile_timeout_s: float = 900.0,
) -> WarmupReport:
    """Warm buckets in the given order.

    Args:
        cache: where the programs go.
        buckets: what to warm.
        probe: runs a program through the path that requests take and returns the seconds of one run.
        report: filled in place, so that others can watch; made here if None.
        on_step: called after each bucket.
        stop: ends the warm-up between two buckets once set.
        enough: asked before each bucket; ends the warm-up once true, as a budget does.
        before: called before each bucket is made; may wait for a good moment.
        compile_timeout_s: most seconds to wait for one program.

    Returns:
        The report. A failing bucket is in ``failed``; nothing is raised for it.
    """
    report = report if report is not None else WarmupReport(len(buckets))
    begin = time.monotonic()
    for done, bucket in enumerate(buckets, start=1):
        if stop is not None and stop.is_set():
            report.stopped = True
            break
        if enough is not None and enough():
            report.enough = True
            break
        try:
            # Nothing is compiled ahead: beside a compile a probe measures 2 to 13 times too long, and what
            # is believed to be slow is not run, so traffic would not correct it (experiments, "Simulated
            # against real"). A stop, or somebody's urgent bucket, need not wait for the whole grid either.
            if before is not None:
                before()
            error = _warm_one(bucket, cache.request(bucket), probe, report, compile_timeout_s)
        except (CancelledError, CompileError):  # the compile service was closed
            report.stopped = True
            break
        if error is not None:
            report.failed[bucket] = error
        report.elapsed_s = time.monotonic() - begin
        if on_step is not None:
            facts = report.warm[-1].facts if error is None else None
            on_step(
                WarmupStep(bucket, done, len(buckets), report.elapsed_s, error, facts, len(report.failed))
            )
    report.elapsed_s = time.monotonic() - begin
    return report


def _warm_one(
    bucket: Bucket,
    future: "Future[Program]",
    probe: Callable[[Program], float],
    report: WarmupReport,
    timeout_s: float,
) -> str | None:
    """Wait for one program and run it once; what went wrong, if anything did."""
    try:
        program = future.result(timeout_s)
    except CancelledError:  # the compile service was closed; no fault of the bucket's
        raise
    except TimeoutError as failure:
        return _named(failure) if future.done() else f"not compiled within {timeout_s:g} s"
    except Exception as failure:  # isolated: named in the report, the other buckets go on
        return _named(failure)
    try:
        report.warm.append(WarmBucket(bucket, program.facts, probe(program)))
    except Exception as failure:
        return f"compiled, but its first run failed: {_named(failure)}"
    return None


def _named(failure: Exception) -> str:
    return str(failure) or type(failure).__name__
