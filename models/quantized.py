"""Products with int8 weights and activations, whose sums are exact.

Weights have a scale for each output, found once; activations one for each token, found when they are
multiplied (Dettmers et al. 2022, arXiv:2208.07339, without its outliers: see `quantize`). Sums of integers do
not depend on their order, so a product is the same to the bit in a batch of any size.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 127  # -128 is not used, so that the range is symmetric
SMALLEST = 1e-20  # what a row of zeros is divided by
_PRECISION = jax.lax.Precision.HIGHEST
# XLA:CPU has an int8 kernel for two rows and more: at 576x3072 one row takes 0.26 ms without it, two 0.07.
_FEWEST_ROWS = 2


class Quantized(NamedTuple):
    """A table of words, or the kernels of all layers.

    Attributes:
        values: int8 `(out, in)`, for kernels one a layer.
        scales: float32 `(out,)`, for kernels one a layer: what 1 of a value stands for.
        turn: float32 `(block, block)`, by which each block of the input is multiplied first; None for none.
    """

    values: Any
    scales: Any
    turn: Any = None


def product(kernels: Quantized, layer: jax.Array, x: jax.Array) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(rows, in)`.

    Returns:
        float32 `(rows, out)`.
    """
    if kernels.turn is not None:
        x = jnp.matmul(x.reshape(-1, len(kernels.turn)), kernels.turn, precision=_PRECISION).reshape(x.shape)
    # Scaled in the branches: what follows the switch is otherwise joined with it into slow loops, and a step
    # at 8 rows takes 15.4 ms instead of 14.0.
    pairs = zip(kernels.values, kernels.scales, strict=True)
    branches = [functools.partial(_times, values, scales) for values, scales in pairs]
    y: jax.Array = jax.lax.switch(layer, branches, *_whole(x))
    return y


def scores(table: Quantized, x: jax.Array) -> jax.Array:
    """Products with each row of a table, float32 `(..., in)` to `(..., out)`."""
    y = _times(table.values, table.scales, *_whole(x.reshape(-1, x.shape[-1])))
    return y.reshape(*x.shape[:-1], -1)


def rows(table: Quantized, ids: jax.Array) -> jax.Array:
    """Rows of a table, float32 `(count, in)`; `ids` int32 `(count,)`."""
    values = jnp.take(table.values, ids, axis=0, mode="clip").astype(jnp.float32)
    return values * jnp.take(table.scales, ids, mode="clip")[:, None]


def _whole(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 `(rows, in)` and what 1 of it stands for, float32 `(rows, 1)`: NaN for a row with NaN."""
    highest = jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), SMALLEST)
    return jnp.round(x * (LARGEST / highest)).astype(jnp.int8), highest * (1 / LARGEST)


def _times(values: jax.Array, scales: jax.Array, whole: jax.Array, scale: jax.Array) -> jax.Array:
    """Exact sums up to 133,000 features of input, scaled."""
    count = whole.shape[0]
    if count < _FEWEST_ROWS:
        whole = jnp.pad(whole, ((0, _FEWEST_ROWS - count), (0, 0)))
    contract = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(whole, values, contract, preferred_element_type=jnp.int32)[:count]
    return sums.astype(jnp.float32) * scale * scales[None]
