"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form of Hugging Face."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import CheckpointError, UnsupportedModel


def frequencies(theta: float, head_size: int, divisors: tuple[float, ...] = ()) -> np.ndarray[Any, Any]:
    """Radians per position of each pair of features, float32 `(head_size / 2,)`."""
    plain = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    return (plain / np.asarray(divisors) if divisors else plain).astype(np.float32)


def divisors(scaling: Mapping[str, Any], theta: float, head_size: int) -> tuple[float, ...]:
    """What divides each frequency, from a `rope_scaling` dict.

    `linear` stretches every wavelength by one factor (Chen et al. 2023, arXiv:2306.15595). `llama3` leaves
    wavelengths shorter than `original / high` alone, stretches those longer than `original / low` by the
    factor, and blends the frequencies linearly in between, as the Llama 3.1 model card's code does.

    Raises:
        UnsupportedModel: another kind of scaling.
        CheckpointError: a number of it is missing.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return ()
    if kind == "linear":
        return (_number(scaling, "factor"),) * (head_size // 2)
    if kind != "llama3":
        raise UnsupportedModel(
            f"rope_scaling must be default, linear or llama3, got {kind!r}: remove it from config.json to "
            "serve the unscaled context"
        )
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = original * frequencies(theta, head_size).astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple(float(d) for d in 1.0 / (kept + (1.0 - kept) / factor))


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(
            f"rope_scaling must give {key} as a positive number, got {value!r}: correct config.json"
        )
    return float(value)


def angles(positions: jax.Array, per_position: np.ndarray[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each pair's turn.

    Args:
        positions: int32 of any shape.
        per_position: float32 `(head_size / 2,)`, see `frequencies`.

    Returns:
        Two float32 arrays `(*positions.shape, head_size / 2)`.
    """
    spread = per_position.reshape((1,) * positions.ndim + per_position.shape)
    turns = positions.astype(jnp.float32)[..., None] * spread
    return jnp.cos(turns), jnp.sin(turns)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs `(x[i], x[i + half])` of the last axis; `cos` and `sin` broadcast to half of it."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
