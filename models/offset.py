"""Products of int8 weights with activations in 256 steps that lie as the activations do.

As in `quantized` weights have a scale for each output and activations one for each token, and sums are exact.
Here a token's steps reach from its smallest value to its largest, with 0 among them (Jacob et al. 2018,
arXiv:1712.05877), which halves the step of what a GELU gives; and features that are far larger than the
others are made smaller before, see `quantize_bert`. An encoder takes each token's activations as uint8 where
the kernel of `native.integers` or `vnni.dot` is available and as int8, 128 smaller, elsewhere: the same
numbers.

The kernel takes weights in panels, and scales what it sums. MiniLM takes 0.69, 0.73, 0.87 and 0.89 times as
long with it as with `vnni.dot` at 1x16, 1x48, 8x64 and 2x256; with scales applied by XLA 1.2 times as long as
so at 1x16, and 1.02 times at 512 tokens.

Without panels activations go first: a MiniLM up of 512 rows takes 0.55 ms with all that surrounds it, and
1.48 with weights first, whose result has to be transposed (float32: 1.17). Scales are applied after the
switch, where biases, GELU or residual are applied too, in one pass: 1.03 times at 8x64, 1.2 at 1x16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import vnni
from .native import integers
from .panels import Panels
from .quantized import SMALLEST

# Of 255, so that the largest and the smallest value may both be rounded outwards.
_STEPS = 254


class Offset(NamedTuple):
    """The kernels of all layers.

    Attributes:
        values: int8 in panels of all layers, or `(out, in)`, one a layer.
        scales: float32 `(layers, out)`: what 1 of a value stands for. In panels `(layers, panels, width)`.
        sums: int32 as scales: each output's values added up.
        lowest: scalar, the smallest that an activation can be: 0 as uint8 or -128 as int8.
        factors: float32 `(layers, in)`, by which the input is multiplied first; None for none.
    """

    values: Any
    scales: Any
    sums: Any
    lowest: Any
    factors: Any = None


class _Steps(NamedTuple):
    """Integers `(rows, in)`, which of them stands for 0, and what a step stands for, both `(rows, 1)`."""

    values: jax.Array
    zero: jax.Array
    scale: jax.Array


def product(kernels: Offset, layer: jax.Array, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`; what a row with NaN or infinity gives is not finite, and stays in its row.
        live: int32 scalar, how many rows are needed; None for all.

    Returns:
        float32 `(..., out)`.
    """
    flat = x.reshape(-1, x.shape[-1])
    if kernels.factors is not None:
        flat = flat * _of(kernels.factors, layer)
    found = _steps(flat, kernels.lowest)
    if isinstance(kernels.values, Panels):
        activations = integers.Rows(found.values, found.zero[:, 0], found.scale[:, 0])
        matrices = integers.Columns(kernels.values.values, kernels.sums, kernels.scales)
        y = integers.product(activations, matrices, layer, features=kernels.values.features, live=live)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    branches = [functools.partial(_dot, one) for one in kernels.values]
    sums: jax.Array = jax.lax.switch(layer, branches, found.values)
    exact = sums[: flat.shape[0]] - found.zero * _of(kernels.sums, layer)
    y = exact.astype(jnp.float32) * found.scale * _of(kernels.scales, layer)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _of(stacked: jax.Array, layer: jax.Array) -> jax.Array:
    """A layer's part, `(1, size)`."""
    part: jax.Array = jax.lax.dynamic_index_in_dim(stacked, layer)
    return part


def _steps(x: jax.Array, lowest: jax.Array) -> _Steps:
    """Rounded, with a scale that is not finite for a row that is not."""
    low = jnp.minimum(jnp.min(x, axis=1, keepdims=True), 0.0)
    high = jnp.maximum(jnp.max(x, axis=1, keepdims=True), 0.0)
    reach = jnp.maximum(high - low, SMALLEST)
    steps = _STEPS / reach
    zero = jnp.round(-low * steps).astype(jnp.int32) + lowest.astype(jnp.int32)
    values = (jnp.round(x * steps).astype(jnp.int32) + zero).astype(lowest.dtype)
    return _Steps(values, zero, reach * (1 / _STEPS))


def _dot(values: jax.Array, x: jax.Array) -> jax.Array:
    """int32 `(rows, out)`, a row of nothing besides where one alone would have no kernel."""
    count: Any = x.shape[0]  # a symbolic one has no value yet, and none of its programs runs
    if isinstance(count, int) and count < vnni.FEWEST_ROWS:
        x = jnp.pad(x, ((0, vnni.FEWEST_ROWS - count), (0, 0)))
    if x.dtype == jnp.uint8:
        return vnni.dot(x, values)
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, values, contract, preferred_element_type=jnp.int32)
