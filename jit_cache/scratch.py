"""What a run takes of a CPU's memory beside what the compiler planned, before any weight is loaded.

A program is run once over weights that are all zeros. Their pages are never written, so the system gives them
no memory, and what the process grows by is the run's own.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ..bucketing import Bucket
from .device_memory import host_free_bytes, peak_bytes
from .hlo_scratch import library_scratch
from .program import Program
from .servable import Servable
from .step_program import CaseProgram

__all__ = ["scratch_without_weights", "zero_leaves"]

_log = logging.getLogger(__name__)
# XLA:CPU uses an array as it is from this alignment on; else it copies, and the zeros take memory.
_ALIGNMENT_BYTES = 64
# Less than this may be the stack of a thread or a page that somebody else touched.
_NOISE_BYTES = 1 << 20
# A plan does not wait longer for runs that only make it closer.
_MOST_S = 60.0


def zero_leaves(servable: Servable) -> list[jax.Array]:
    """Zeros in the place of every parameter, which take no memory until something writes to them."""
    return [jax.device_put(_zeros(one.shape, one.dtype)) for one in servable.abstract_leaves]


def scratch_without_weights(
    servable: Servable, programs: Mapping[Bucket, Program], *, most_bytes: int
) -> dict[Bucket, int]:
    """Bytes that libraries take beside the compiler's scratch, of each program.

    Measured by one run each, or the upper estimate of `servax.jit_cache.hlo_scratch.library_scratch` where a
    program cannot be run so: it would not fit, in what is allowed or in what is free, is stepped, lies on
    several devices or on no CPU, or has a loop that weights of zero might never end. After a minute of runs
    the rest is estimated too.

    Args:
        servable: whose programs.
        programs: over whatever leaves.
        most_bytes: what weights and one run may take together.
    """
    leaves: list[jax.Array] = []
    measured = servable.devices is None and servable.platform == "cpu"
    # The budget may be that of another machine.
    most_bytes, until_s = min(most_bytes, host_free_bytes()), time.monotonic() + _MOST_S
    found: dict[Bucket, int] = {}
    for bucket, program in programs.items():
        as_text = getattr(program.executable, "as_text", None)
        text = as_text() if as_text is not None else ""
        took = None
        in_time = time.monotonic() < until_s
        if measured and in_time and text and _ends(text) and _fits(program, most_bytes, text):
            leaves = leaves or zero_leaves(servable)
            took = _took(servable, program.with_leaves(leaves))
        if took is None or took < _NOISE_BYTES:
            estimate = library_scratch(text) if text else 0
            took = estimate if took is None else min(estimate, _NOISE_BYTES)
        found[bucket] = took
    return found


def _ends(text: str) -> bool:
    """Whether each loop of a program runs a number of times that no weight decides."""
    return text.count(" while(") <= text.count('"known_trip_count"')


def _fits(program: Program, most_bytes: int, text: str) -> bool:
    facts = program.facts
    run = facts.argument_bytes + facts.temp_bytes + facts.output_bytes + library_scratch(text)
    return run <= most_bytes and not isinstance(program, CaseProgram)


def _took(servable: Servable, program: Program) -> int | None:
    shapes = servable.traced_inputs(program.bucket)
    inputs = {name: np.zeros(one.shape, one.dtype) for name, one in shapes.items()}
    try:
        took = peak_bytes(lambda: program(inputs))
    except Exception as error:  # the warm-up meets it again, and names it
        _log.debug("%s: bucket %s was not measured: %s", servable.name, program.bucket, error)
        return None
    known = program.facts.temp_bytes + program.facts.output_bytes
    return None if took is None else max(0, took - known)


def _zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
    begin = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[begin : begin + size].view(dtype).reshape(shape)
