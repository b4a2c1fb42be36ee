"""Token vectors to one vector per text; padding never enters a sum or a maximum."""

import jax
import jax.numpy as jnp

from .apart import PRECISION

# The floor torch's `normalize` uses: below it a vector is divided by the floor, so zeros stay zeros.
_NORM_FLOOR = 1e-12


def pool(vectors: jax.Array, mask: jax.Array, how: str, *, normalize: bool) -> jax.Array:
    """Pool over the tokens where `mask` is True.

    Args:
        vectors: float32 `(..., length, hidden)`.
        mask: bool `(..., length)`.
        how: `mean`, `cls` (the first real token), `max` or `mean_sqrt_len` (sum over the root of the count).
        normalize: divide by the L2 norm; a zero vector stays zero.

    Returns:
        float32 `(..., hidden)`; zeros where `mask` has no True.
    """
    if how == "max":
        highest = jnp.max(jnp.where(mask[..., None], vectors, -jnp.inf), axis=-2)
        pooled = jnp.where(jnp.any(mask, axis=-1)[..., None], highest, 0.0)
    else:
        total = jnp.sum(jnp.where(_summed(mask, how)[..., None], vectors, 0.0), axis=-2)
        pooled = _scaled(total, mask, how)
    return unit_norm(pooled) if normalize else pooled


def pool_segments(
    vectors: jax.Array, segment_ids: jax.Array, max_segments: int, how: str, *, normalize: bool
) -> jax.Array:
    """Pool each segment of packed rows.

    Args:
        vectors: float32 `(batch, length, hidden)`, finite at padding too: there it is multiplied by 0.
        segment_ids: int32 `(batch, length)`, 0 on padding, else 1 to `max_segments`.
        max_segments: segments a row can hold.
        how: see `pool`.
        normalize: see `pool`.

    Returns:
        float32 `(batch, max_segments, hidden)`.
    """
    numbers = jnp.arange(1, max_segments + 1, dtype=jnp.int32)[None, :, None]
    mask = segment_ids[:, None, :] == numbers
    if how == "max":
        return pool(vectors[:, None], mask, how, normalize=normalize)
    # A product instead of a select and a sum over (batch, segments, length, hidden): 1.01x at 1x64 to 2x256,
    # 1.015x at 8x64.
    chosen = _summed(mask, how).astype(vectors.dtype)
    pooled = _scaled(jnp.einsum("bsl,blh->bsh", chosen, vectors, precision=PRECISION), mask, how)
    return unit_norm(pooled) if normalize else pooled


def _summed(mask: jax.Array, how: str) -> jax.Array:
    """Which tokens are added up."""
    return mask & (jnp.cumsum(mask.astype(jnp.int32), axis=-1) == 1) if how == "cls" else mask


def _scaled(total: jax.Array, mask: jax.Array, how: str) -> jax.Array:
    """A sum, `(..., hidden)`, divided as the pooling says."""
    if how == "cls":
        return total
    count = jnp.maximum(jnp.sum(mask, axis=-1, dtype=jnp.float32), 1.0)[..., None]
    return total / (count if how == "mean" else jnp.sqrt(count))


def unit_norm(vectors: jax.Array) -> jax.Array:
    """Divide by the L2 norm over the last axis; a zero vector stays zero."""
    square = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    # Selected before the root: its slope at zero is infinite, and in a gradient infinity times 0 is NaN.
    norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    return vectors / jnp.maximum(norm, _NORM_FLOOR)
