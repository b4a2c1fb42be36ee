"""A decoder's matrices in float32, held as `(out, in)`.

A step of one row is bound by reading them, and XLA:CPU reads 36 GB/s of `(in, out)` and 46 of `(out, in)`:
the products of SmolLM2's layers take 13.1 and 9.3 ms. From 2 to 48 rows they go first, times activations as
columns, which is as fast as the other layout or a little faster (16 rows: 19.3 ms against 20.3); above that
rows times `(out, in)` is. A step of SmolLM2 as a whole takes 12.0 ms instead of 14.3 at 1 row, 19.3 instead
of 20.8 at 4 and 29.0 instead of 31.9 at 16; at 2, 8 and 32 rows it is within 3 %.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

_PRECISION = jax.lax.Precision.HIGHEST
_MOST_COLUMNS = 48
_CONTRACT = (((1,), (1,)), ((), ()))


class Turned(NamedTuple):
    """The kernels of all layers.

    Attributes:
        kernels: float32 `(out, in)`, one a layer.
    """

    kernels: Any


def turned(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with each layer's kernels as arrays of their own, turned.

    Args:
        params: float32 NumPy arrays, layers stacked on axis 0, kernels `(layers, in, out)`; not changed.
    """

    def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: Turned(tuple(np.ascontiguousarray(one.T) for one in leaf)) if name == "kernel" else leaf
            for name, leaf in leaves.items()
        }

    return {**params, "layers": {name: split(leaves) for name, leaves in params["layers"].items()}}


def product(kernels: Turned, layer: jax.Array, x: jax.Array) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`.

    Returns:
        float32 `(..., out)`.
    """
    y: jax.Array = jax.lax.switch(layer, [functools.partial(scores, one) for one in kernels.kernels], x)
    return y


def scores(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Products with each row of a matrix, `(out, in)`: float32 `(..., in)` to `(..., out)`."""
    flat = x.reshape(-1, x.shape[-1])
    count: Any = flat.shape[0]  # a symbolic one has no value yet, and none of its programs runs
    if isinstance(count, int) and 1 < count <= _MOST_COLUMNS and jax.default_backend() == "cpu":
        y = jax.lax.dot_general(matrix, flat, _CONTRACT, precision=_PRECISION)
        # The compiler would merge the transpose with the product, and swap what goes first.
        y = jax.lax.optimization_barrier(y).T
    else:
        y = jax.lax.dot_general(flat, matrix, _CONTRACT, precision=_PRECISION)
    return y.reshape(*x.shape[:-1], matrix.shape[0])
