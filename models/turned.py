"""Matrices held as `(out, in)`, in float32 or bfloat16; products sum in float32, as is all between them.

This is what is served where the kernel of `native` is not available, see `panels`.

**float32**, of decoders. A step of one row is bound by reading the matrices, and XLA:CPU reads 36 GB/s of
`(in, out)` and 46 of `(out, in)`: the products of SmolLM2's layers take 13.1 and 9.3 ms. From 2 to 48 rows
they go first, times activations as columns, which is as fast as the other layout or a little faster (16
rows: 19.3 ms against 20.3); above that rows times `(out, in)` is. A step of SmolLM2 as a whole takes 12.0 ms
instead of 14.3 at 1 row, 19.3 instead of 20.8 at 4 and 29.0 instead of 31.9 at 16; at 2, 8 and 32 rows it is
within 3 %.

**bfloat16**, whose products take operands in bfloat16: half the bytes, of which a step of few rows spends its
time reading, and twice the arithmetic where there are such products. XLA:CPU rearranges a kernel at each
call, and takes this layout faster: in a chain that comes from memory SmolLM2's gate and up take 0.137 ms of
two cores against 0.159 at 2 rows and 0.152 against 0.166 at 8 (float32: 0.217 and 0.255), its down 0.102
against 0.129 and 0.108 against 0.138 (0.100 and 0.137). Kernels that go first, as eight bits like it, lose at
2 rows what they gain at 32.
"""

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]
_TABLES = ("word", "head")
_CONTRACT = (((1,), (1,)), ((), ()))
_MOST_COLUMNS = 48
# XLA:CPU has no bfloat16 kernel for one row: at 576x3072 it takes 0.38 ms, and two take 0.14. Other platforms
# have products of a matrix and a vector, which a second row would keep them from.
_FEWEST_BRIEF = 2


class Turned(NamedTuple):
    """The kernels of all layers.

    Attributes:
        kernels: float32 or bfloat16 `(out, in)`, one a layer.
    """

    kernels: Any


def turned(params: Mapping[str, Any], dtype: Any = np.float32) -> dict[str, Any]:
    """The same parameters with each layer's kernels as arrays of their own, turned; other leaves as they are.

    Args:
        params: float32 NumPy arrays, layers stacked on axis 0, kernels `(layers, in, out)`; not changed.
        dtype: of kernels and tables of words, float32 or bfloat16.
    """
    out = {name: leaf.astype(dtype, copy=False) if name in _TABLES else leaf for name, leaf in params.items()}

    def one(kernel: Array) -> Array:
        return np.ascontiguousarray(kernel.astype(dtype, copy=False).T)

    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock

        def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: Turned(tuple(pool.map(one, leaf))) if name == "kernel" else leaf
                for name, leaf in leaves.items()
            }

        out["layers"] = {name: split(leaves) for name, leaves in params["layers"].items()}
    return out


def product(kernels: Turned, layer: jax.Array, x: jax.Array) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`.

    Returns:
        float32 `(..., out)`.
    """
    # Rounded before the switch and cut after it, where that is joined with what stands around it.
    branches = [functools.partial(_times, one) for one in kernels.kernels]
    y: jax.Array = jax.lax.switch(layer, branches, _operand(x, kernels.kernels[0].dtype))
    return _as_rows_of(x, y)


def scores(table: jax.Array, x: jax.Array) -> jax.Array:
    """Products with each row of a table, `(out, in)`: float32 `(..., in)` to `(..., out)`."""
    return _as_rows_of(x, _times(table, _operand(x, table.dtype)))


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table, of any type, as float32; `ids` int32, those outside are clipped into it."""
    return jnp.take(table, ids, axis=0, mode="clip").astype(jnp.float32)


def _operand(x: jax.Array, dtype: Any) -> jax.Array:
    """`(rows, in)` of that type, with a row of zeros where there is no kernel for so few."""
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    few = dtype == jnp.bfloat16 and _on_cpu(flat, 0, _FEWEST_BRIEF - 1)
    return jnp.pad(flat, ((0, _FEWEST_BRIEF - flat.shape[0]), (0, 0))) if few else flat


def _times(matrix: jax.Array, x: jax.Array) -> jax.Array:
    if matrix.dtype == jnp.bfloat16:
        return jax.lax.dot_general(x, matrix, _CONTRACT, preferred_element_type=jnp.float32)
    precision = jax.lax.Precision.HIGHEST
    if _on_cpu(x, 2, _MOST_COLUMNS):
        # The compiler would merge the transpose with the product, and swap what goes first.
        y: jax.Array = jax.lax.optimization_barrier(
            jax.lax.dot_general(matrix, x, _CONTRACT, precision=precision)
        )
        return y.T
    return jax.lax.dot_general(x, matrix, _CONTRACT, precision=precision)


def _on_cpu(x: jax.Array, fewest: int, most: int) -> bool:
    """Whether the platform is a CPU and `x` has so many rows."""
    count: Any = x.shape[0]  # a symbolic one has no value yet, and none of its programs runs
    return isinstance(count, int) and fewest <= count <= most and jax.default_backend() == "cpu"


def _as_rows_of(x: jax.Array, y: jax.Array) -> jax.Array:
    return y[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], y.shape[-1])
