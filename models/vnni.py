"""uint8 times int8: the product that x86 processors with AVX-512 VNNI have an instruction for.

XLA:CPU has fast kernels for it, and JAX no operation that leads there: its `dot_general` widens operands of
two types to the type of the result. int8 times int8 goes through 16 bits and takes 1.5 to 4 times as long.

This is what is served where the processor has the instruction and there is no kernel of `native.integers`,
which takes 0.4 to 0.65 times as long for a decoder's products: XLA:CPU rearranges one side at each call.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

FEWEST_FEATURES = 8  # below, and with one row on either side, XLA:CPU has no kernel
FEWEST_ROWS = 2
_CONTRACT = 1  # the last axis of both
_dot_p = Primitive("servax_uint8_int8_dot")


def dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """Products of each row of one with each row of the other; exact up to 65,000 features.

    Args:
        left: uint8 `(m, features)`, at least `FEWEST_ROWS` and `FEWEST_FEATURES`.
        right: int8 `(n, features)`, the same.

    Returns:
        int32 `(m, n)`. It stays behind a barrier: a transpose that the compiler merges with the product
        swaps the operands, and of int8 times uint8 it knows nothing.
    """
    sums: jax.Array = jax.lax.optimization_barrier(_dot_p.bind(left, right))
    return sums


@functools.cache
def available() -> bool:
    """Whether programs made here may use `dot`: the processor has it, and a trial gives what it should."""
    if jax.default_backend() != "cpu" or not _has_instruction():
        return False
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 256, (9, 40), np.uint8), rng.integers(-127, 128, (3, 40), np.int8)
    try:
        got = np.asarray(jax.jit(dot)(left, right))
    except Exception:  # of what XLA says: a flag that takes the kernels away ends here
        return False
    return bool((got == left.astype(np.int64) @ right.T.astype(np.int64)).all())


def fits(outputs: int, features: int) -> bool:
    """Whether a matrix `(outputs, features)` is large enough for `dot`."""
    return outputs >= FEWEST_ROWS and features >= FEWEST_FEATURES


def _has_instruction() -> bool:
    try:
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def _shape(left: Any, right: Any) -> Any:
    return jax.core.ShapedArray((left.shape[0], right.shape[0]), jnp.int32)


def _lower(context: Any, left: Any, right: Any) -> list[Any]:
    sizes = context.avals_out[0].shape
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[],
        rhs_batching_dimensions=[],
        lhs_contracting_dimensions=[_CONTRACT],
        rhs_contracting_dimensions=[_CONTRACT],
    )
    made = ir.RankedTensorType.get(sizes, ir.IntegerType.get_signless(32))
    return [stablehlo.dot_general(made, left, right, numbers)]


_dot_p.def_abstract_eval(_shape)
mlir.register_lowering(_dot_p, _lower, platform="cpu")
