"""Products with int8 weights and activations, whose sums are exact.

Weights have a scale for each output, found once; activations one for each token, found when they are
multiplied (Dettmers et al. 2022, arXiv:2208.07339, without its outliers: see `quantize`). Sums of integers do
not depend on their order, so a product is the same to the bit in a batch of any size.

Where the kernel of `native.integers` is available weights are in panels, see `panels`, and activations uint8,
128 larger than they are; it takes off what that adds to the sums, and scales them. The products of SmolLM2's
layers with all that surrounds them take 2.9, 5.6, 11.1 and 18.4 ms of two cores at 1, 8, 32 and 64 rows, in
bfloat16 4.1, 6.1, 13.5 and 23.5. With scales applied by XLA a step takes 8.6 ms instead of 7.0 at 8 rows and
18.7 instead of 15.0 at 32.

Elsewhere, where `vnni.dot` is available, one side is stored or sent as uint8. The side that goes second is
rearranged at each call, see `quantize` for which; those products take 7.4, 10.1, 17.3 and 29.5 ms. As int8
times int8 SmolLM2's kernels take 1.7 and 2.2 times as long as so at 8 and 32 rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import vnni
from .native import integers
from .panels import Panels

LARGEST = 127  # -128 is not used, so that the range is symmetric
SMALLEST = 1e-20  # what a row of zeros is divided by
MIDDLE = 128  # 0 as uint8
_PRECISION = jax.lax.Precision.HIGHEST
# XLA:CPU has an int8 kernel for two rows and more: at 576x3072 one row takes 0.26 ms without it, two 0.07.
_FEWEST_ROWS = vnni.FEWEST_ROWS


class Quantized(NamedTuple):
    """A table of words, or the kernels of all layers.

    Attributes:
        values: int8 `(out, in)`, for kernels one a layer; or uint8, 128 larger; or int8 in panels of all
            layers, and of a table as of one layer.
        scales: float32 `(out,)`, for kernels one a layer: what 1 of a value stands for.
        turn: float32 `(block, block)`, by which each block of the input is multiplied first; None for none.
        sums: int32 `(out,)`, for kernels one a layer: 128 times the sum of an output's values, which says
            that activations are to be uint8; None for int8.

    In panels scales and sums are `(layers, panels, width)`, and sums those of the values themselves.
    """

    values: Any
    scales: Any
    turn: Any = None
    sums: Any = None


class _Whole(NamedTuple):
    """Activations: int8 or uint8 `(rows, in)`, what 1 of it stands for `(rows, 1)`, and 128 times its sum."""

    values: jax.Array
    scale: jax.Array
    sums: jax.Array


def product(kernels: Quantized, layer: jax.Array, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(rows, in)`.
        live: int32 scalar, how many rows are needed; None for all.

    Returns:
        float32 `(rows, out)`.
    """
    if kernels.turn is not None:
        x = jnp.matmul(x.reshape(-1, len(kernels.turn)), kernels.turn, precision=_PRECISION).reshape(x.shape)
    if isinstance(kernels.values, Panels):
        return _in_panels(kernels, layer, x, live)
    # Scaled in the branches: what follows the switch is otherwise joined with it into slow loops, and a step
    # at 32 rows takes 35.2 ms instead of 32.1.
    sums = kernels.sums or [None] * len(kernels.values)
    parts = zip(kernels.values, kernels.scales, sums, strict=True)
    branches = [functools.partial(_times, *part) for part in parts]
    y: jax.Array = jax.lax.switch(layer, branches, _whole(x, unsigned=kernels.sums is not None))
    return y[: x.shape[0]]


def scores(table: Quantized, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """Products with each row of a table, float32 `(..., in)` to `(..., out)`; see `product`."""
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(table.values, Panels):
        return _in_panels(table, jnp.int32(0), flat, live).reshape(*x.shape[:-1], -1)
    y = _times(table.values, table.scales, table.sums, _whole(flat, unsigned=table.sums is not None))
    return y[: flat.shape[0]].reshape(*x.shape[:-1], -1)


def rows(table: Quantized, ids: jax.Array) -> jax.Array:
    """Rows of an int8 table, float32 `(count, in)`; `ids` int32 `(count,)`."""
    values = jnp.take(table.values, ids, axis=0, mode="clip").astype(jnp.float32)
    return values * jnp.take(table.scales, ids, mode="clip")[:, None]


def _in_panels(kernels: Quantized, layer: jax.Array, x: jax.Array, live: jax.Array | None) -> jax.Array:
    """By the kernel of `native`, which scales too."""
    found = _rounded(x, unsigned=True)
    middles = jnp.full(x.shape[0], MIDDLE, jnp.int32)
    activations = integers.Rows(found.values, middles, found.scale[:, 0])
    matrices = integers.Columns(kernels.values.values, kernels.sums, kernels.scales)
    return integers.product(activations, matrices, layer, features=kernels.values.features, live=live)


def _whole(x: jax.Array, *, unsigned: bool) -> _Whole:
    """Rounded, at least `_FEWEST_ROWS`."""
    if len(x) < _FEWEST_ROWS:
        x = jnp.pad(x, ((0, _FEWEST_ROWS - len(x)), (0, 0)))
    return _rounded(x, unsigned=unsigned)


def _rounded(x: jax.Array, *, unsigned: bool) -> _Whole:
    """With a scale that is NaN for a row with NaN."""
    highest = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), SMALLEST)
    values = jnp.round(x * (LARGEST / highest)).astype(jnp.int8)
    wide = values.astype(jnp.int32)
    sums = MIDDLE * jnp.sum(wide, axis=1, keepdims=True)
    return _Whole((wide + MIDDLE).astype(jnp.uint8) if unsigned else values, highest * (1 / LARGEST), sums)


def _times(values: jax.Array, scales: jax.Array, sums: jax.Array | None, x: _Whole) -> jax.Array:
    """Exact sums up to 65,000 features of input, scaled."""
    if values.dtype == jnp.uint8:
        found = vnni.dot(values, x.values) - x.sums.T
        return (found.astype(jnp.float32) * x.scale.T * scales[:, None]).T
    if sums is not None:
        found = vnni.dot(x.values, values) - sums[None]
    else:
        contract = (((1,), (1,)), ((), ()))
        found = jax.lax.dot_general(x.values, values, contract, preferred_element_type=jnp.int32)
    return found.astype(jnp.float32) * x.scale * scales[None]
