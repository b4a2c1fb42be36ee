"""Attention of rows of texts to themselves, called from JAX."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from . import compiled, crew, encoder, exponential, header, tiles
from .target import tile

_TARGET = "servax_rows_attention_v1"
_MASKED = -1e30


def fits(size: int) -> bool:
    """Whether programs made here may call `attend` for heads of that size."""
    return available() and size > 0 and size % tile().lanes == 0


def available() -> bool:
    """Whether the kernel compiles here, and a trial gives what it should."""
    with compiled.asking:
        return _available()


@functools.cache
def _available() -> bool:
    return compiled.usable("attention within rows", _tried)


def _tried() -> bool:
    shape, layout = tile(), header.read()
    sources = (crew.source(layout, shape), tiles.source(shape), exponential.source(shape))
    compiled.register(_TARGET, "attention", [*sources, encoder.source(layout, shape)])
    size, length = shape.lanes, 3 * shape.rows + 1
    qkv = np.random.default_rng(0).normal(size=(2, length, 6 * size)).astype(np.float32)
    texts = np.repeat(np.array([[1, 2, 0], [4, 4, 5]], np.int32), [9, length - 11, 2], axis=1)
    got = np.asarray(jax.jit(functools.partial(_call, 2))(qkv, texts))
    return bool(np.allclose(got, _wanted(qkv, texts), rtol=1e-5, atol=1e-5))


def attend(qkv: jax.Array, texts: jax.Array, *, heads: int) -> jax.Array:
    """Attention of each token to those of its text.

    Args:
        qkv: float32 `(batch, length, 3 * heads * size)`: queries, keys and values, each head after head.
        texts: int32 `(batch, length)`: which text a token is of, 0 to 2**31 - 3; tokens of one text read one
            another, wherever they stand in the row.
        heads: how many there are.

    Returns:
        float32 `(batch, length, heads * size)`.

    Raises:
        InputError: there are not as many features, or texts.
    """
    qkv, texts, width = qkv.astype(jnp.float32), texts.astype(jnp.int32), qkv.shape[2]
    if heads < 1 or not width or width % (3 * heads * tile().lanes) or texts.shape != qkv.shape[:2]:
        raise InputError(
            f"qkv must be (batch, length, 3 * heads * size), sizes multiples of {tile().lanes}, and texts "
            f"(batch, length), got {qkv.shape}, {heads} heads and {texts.shape}: ask `fits` first"
        )
    call = compiled.with_reference(functools.partial(_call, heads), functools.partial(_reference, heads))
    y: jax.Array = call(qkv, texts)
    return y


def _call(heads: int, qkv: jax.Array, texts: jax.Array) -> jax.Array:
    batch, length, width = qkv.shape
    size = width // (3 * heads)
    shape = jax.ShapeDtypeStruct((batch, length, heads, size), jnp.float32)
    call: Any = jax.ffi.ffi_call(_TARGET, shape, vmap_method="sequential")
    y: jax.Array = call(qkv, texts, np.float32(1.0 / math.sqrt(size)))
    return y.reshape(batch, length, heads * size)


def _wanted(qkv: np.ndarray[Any, Any], texts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the trial should give, without a program of XLA's for each operation."""
    batch, length, _ = qkv.shape
    q, k, v = np.moveaxis(qkv.reshape(batch, length, 3, 2, -1), 2, 0)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    own = texts[:, None, :, None] == texts[:, None, None, :]
    weights = np.exp(np.where(own, scores, -np.inf))
    mixed: np.ndarray[Any, Any] = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    joined: np.ndarray[Any, Any] = mixed.reshape(batch, length, -1)
    return joined


def _reference(heads: int, qkv: jax.Array, texts: jax.Array) -> jax.Array:
    batch, length, width = qkv.shape
    size = width // (3 * heads)
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, size), 2, 0)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision) * (1.0 / math.sqrt(size))
    own = texts[:, None, :, None] == texts[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(own, scores, _MASKED), axis=-1)
    y: jax.Array = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision)
    return y.reshape(batch, length, heads * size)
