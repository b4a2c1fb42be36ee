"""How long a program takes, and how fast this machine multiplies matrices at best."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .program import Program
from .servable import Servable
from .staging import Staging, full_batch

_LEAST_S = 0.2
_SIZE = {"cpu": 1024}
_LARGE = 8192


def time_program(program: Program, servable: Servable, *, least_s: float = _LEAST_S) -> float:
    """Seconds of one run on a full batch (every size is the bucket's), the fastest of several.

    Args:
        program: what to run.
        servable: whose program it is.
        least_s: how long to go on measuring; at least three runs in any case.
    """
    batch = full_batch(servable.signature, program.bucket)
    staging = Staging(servable.signature, program.bucket)
    arrays = staging.fill([one.item for one in batch], [one.sizes for one in batch])
    return fastest(lambda: program(arrays), least_s=least_s)


def fastest(call: Callable[[], Any], *, least_s: float = _LEAST_S) -> float:
    """Seconds of the fastest of several calls, waiting for what each computes; the first is not counted."""
    jax.block_until_ready(call())
    best, begin, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - begin < least_s:
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def matrix_peak(dtype: Any = jnp.float32, *, device: jax.Device | None = None) -> float:
    """Floating-point operations a second of a large square matrix product, measured now.

    Args:
        dtype: of both factors.
        device: where; None means the default device.
    """
    where = device if device is not None else jax.local_devices()[0]
    size = _SIZE.get(where.platform, _LARGE)
    left = jax.device_put(np.ones((size, size), dtype), where)
    product = jax.jit(jnp.matmul).lower(left, left).compile()
    return 2 * size**3 / fastest(lambda: product(left, left))
