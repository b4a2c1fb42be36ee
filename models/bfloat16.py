"""Matrices in bfloat16, whose products take operands in bfloat16 and sum in float32.

Half the bytes, of which a step of few rows spends its time reading, and twice the arithmetic where there are
such products. What lies between them stays float32.

XLA:CPU rearranges a kernel at each call, and takes `(out, in)` faster than `(in, out)`: in a chain that comes
from memory SmolLM2's gate and up take 0.137 ms of two cores against 0.159 at 2 rows and 0.152 against 0.166
at 8 (float32: 0.217 and 0.255), its down 0.102 against 0.129 and 0.108 against 0.138 (0.100 and 0.137).
Kernels that go first, as eight bits like it, lose at 2 rows what they gain at 32.
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
# XLA:CPU has no kernel for one row: at 576x3072 it takes 0.38 ms, and two take 0.14. Other platforms have
# products of a matrix and a vector, which a second row would keep them from.
_FEWEST_ROWS = 2


class Brief(NamedTuple):
    """The kernels of all layers.

    Attributes:
        kernels: bfloat16 `(out, in)`, one a layer.
    """

    kernels: Any


def rounded(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with kernels and tables of words in bfloat16, and each layer's kernels apart.

    Args:
        params: float32 NumPy arrays, layers stacked on axis 0, kernels `(layers, in, out)`; not changed.

    Returns:
        The tree, with `Brief` for the kernels of a linear map.
    """
    out = {name: leaf.astype(jnp.bfloat16) if name in _TABLES else leaf for name, leaf in params.items()}
    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock

        def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: Brief(tuple(pool.map(_turned, leaf))) if name == "kernel" else leaf
                for name, leaf in leaves.items()
            }

        out["layers"] = {name: split(leaves) for name, leaves in params["layers"].items()}
    return out


def _turned(kernel: Array) -> Array:
    return np.ascontiguousarray(kernel.astype(jnp.bfloat16).T)


def product(kernels: Brief, layer: jax.Array, x: jax.Array) -> jax.Array:
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
    y: jax.Array = jax.lax.switch(layer, branches, _operand(x))
    return _as_rows_of(x, y)


def scores(table: jax.Array, x: jax.Array) -> jax.Array:
    """Products with each row of a table, bfloat16 `(out, in)`: float32 `(..., in)` to `(..., out)`."""
    return _as_rows_of(x, _times(table, _operand(x)))


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table, of any type, as float32; `ids` int32, those outside are clipped into it."""
    return jnp.take(table, ids, axis=0, mode="clip").astype(jnp.float32)


def _operand(x: jax.Array) -> jax.Array:
    """bfloat16 `(rows, in)`, with a row of zeros where there is no kernel for so few."""
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    count: Any = flat.shape[0]  # a symbolic one has no value yet, and none of its programs runs
    few = isinstance(count, int) and count < _FEWEST_ROWS and jax.default_backend() == "cpu"
    return jnp.pad(flat, ((0, _FEWEST_ROWS - count), (0, 0))) if few else flat


def _times(matrix: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _as_rows_of(x: jax.Array, y: jax.Array) -> jax.Array:
    return y[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], y.shape[-1])
