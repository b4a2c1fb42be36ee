"""Tuning a bucket: every variant that was never timed in it is made and timed, and the fastest stays."""

import logging
from collections.abc import Callable
from functools import partial

from ...bucketing import Bucket
from ...jit_cache import CompileService, Program
from .model import Model

_log = logging.getLogger(__name__)
_COMPILE_TIMEOUT_S = 900.0
# Alternating, so that a machine that slows down for a while does so to all; the least of them counts.
_ROUNDS = 3
_LONG_S = 0.5


def tune_bucket(
    model: Model,
    bucket: Bucket,
    compiler: CompileService,
    trial: Callable[[Model, Program, str], float],
) -> None:
    """Time the variants of a warm bucket that were not, against the one in place; blocks.

    A variant that does not compile or run is left out, with a warning: the one in place goes on.

    Args:
        model: whose.
        bucket: a warm one.
        compiler: makes them.
        trial: runs a program once on the device thread, with the purpose of `Probe`; its seconds.
    """
    tuner = model.maker.tuner
    for variant in tuner.missing(bucket):
        present = model.cache.get(bucket)
        try:
            made = compiler.submit(partial(model.maker.variant, bucket, variant)).result(_COMPILE_TIMEOUT_S)
            if made.variant == present.variant:
                continue
            times: dict[str, list[float]] = {present.variant: [], made.variant: []}
            for _ in range(_ROUNDS):
                for program in (present, made):
                    times[program.variant].append(trial(model, program, "trial"))
                if max(map(max, times.values())) > _LONG_S:
                    break
            for program in (present, made):
                model.maker.learned(program, min(times[program.variant]))
            if tuner.best(bucket) == made.variant:
                trial(model, made, "replace")
        except Exception as error:  # isolated: what is warm goes on serving
            _log.warning("%s: variant %r of bucket %s is left out: %s", model.name, variant, bucket, error)
