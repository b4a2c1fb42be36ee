"""Attention of rows of texts to themselves, called from JAX."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from . import compiled, crew, encoder, header
from .target import Tile, tile

_TARGET = "servax_rows_attention_v2"
_MASKED = -1e30

Array = np.ndarray[Any, Any]


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
    shape = tile()
    compiled.register(handler(shape))
    size, lengths = shape.lanes, (3 * shape.rows + 1, 5)
    rng, tokens = np.random.default_rng(0), sum(lengths)
    qkv = rng.normal(size=(tokens + 2, 6 * size)).astype(np.float32)
    texts = np.repeat(np.array([1, 2, 4, 3, 3], np.int32), [9, tokens - 17, 3, 5, 2])
    starts = np.array([0, lengths[0], tokens], np.int32)
    got = np.asarray(jax.jit(functools.partial(_call, 2))(qkv, texts, starts))
    return bool(np.allclose(got, _wanted(qkv, texts, starts), rtol=1e-5, atol=1e-5))


def handler(tile: Tile) -> compiled.Handler:
    """The kernel for one kind of machine.

    Raises:
        KernelUnavailable: there is none for this jaxlib.
    """
    layout = header.read()
    return compiled.Handler(_TARGET, "attention", [crew.source(layout, tile), encoder.source(layout, tile)])


def attend(
    qkv: jax.Array, texts: jax.Array, starts: jax.Array, *, heads: int, longest: int | None = None
) -> jax.Array:
    """Attention of each token to those of its text, in rows that lie one behind another.

    Args:
        qkv: float32 `(tokens, 3 * heads * size)`: queries, keys and values, each head after head.
        texts: int32 `(tokens,)`: which text a token is of, 0 to 2**31 - 3; tokens of one text in one row read
            one another, wherever they stand in it.
        starts: int32 `(rows + 1,)`, rising from 0: where each row begins, and where the last ends.
        heads: how many there are.
        longest: tokens that a row has at most, for the memory of derivatives; None for all.

    Returns:
        float32 `(tokens, heads * size)`; zeros behind the last row, which cost nothing.

    Raises:
        InputError: there are not as many features, or texts.
    """
    qkv, texts, starts = qkv.astype(jnp.float32), texts.astype(jnp.int32), starts.astype(jnp.int32)
    width = qkv.shape[1] if qkv.ndim == 2 else 0
    sized = texts.shape == qkv.shape[:1] and starts.ndim == 1 and starts.shape[0] > 0
    if heads < 1 or not width or width % (3 * heads * tile().lanes) or not sized:
        raise InputError(
            f"qkv must be (tokens, 3 * heads * size), sizes multiples of {tile().lanes}, texts (tokens,) and "
            f"starts (rows + 1,), got {qkv.shape}, {heads} heads, {texts.shape} and {starts.shape}: ask "
            "`fits` first"
        )
    longest = qkv.shape[0] if longest is None else longest
    reference = functools.partial(_reference, heads, longest)
    call = compiled.with_reference(functools.partial(_call, heads), reference)
    y: jax.Array = call(qkv, texts, starts)
    return y


def _call(heads: int, qkv: jax.Array, texts: jax.Array, starts: jax.Array) -> jax.Array:
    tokens, width = qkv.shape
    size = width // (3 * heads)
    shape = jax.ShapeDtypeStruct((tokens, heads, size), jnp.float32)
    call: Any = jax.ffi.ffi_call(_TARGET, shape, vmap_method="sequential")
    y: jax.Array = call(qkv, texts, starts, np.float32(1.0 / math.sqrt(size)))
    return y.reshape(tokens, heads * size)


def _wanted(qkv: Array, texts: Array, starts: Array) -> Array:
    """What the trial should give, without a program of XLA's for each operation."""
    tokens, live = len(qkv), starts[-1]
    q, k, v = np.moveaxis(qkv.reshape(tokens, 3, 2, -1)[:live], 1, 0)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    own = texts[:live, None] == texts[None, :live]
    weights = np.exp(np.where(own, scores, -np.inf))
    mixed: Array = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    return np.concatenate([mixed.reshape(live, -1), np.zeros((tokens - live, qkv.shape[1] // 3))])


def _reference(heads: int, longest: int, qkv: jax.Array, texts: jax.Array, starts: jax.Array) -> jax.Array:
    """In rows of one length: scores of all tokens with all others would take far more memory."""
    tokens, width = qkv.shape
    places = starts[:-1, None] + jnp.arange(longest, dtype=jnp.int32)[None]
    inside = places < starts[1:, None]
    held = jnp.minimum(places, tokens - 1)
    qkv = jnp.where(inside[:, :, None], qkv[held], 0.0)  # of another row, which may not be finite
    q, k, v = jnp.moveaxis(qkv.reshape(*held.shape, 3, heads, width // (3 * heads)), 2, 0)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision) * (1.0 / math.sqrt(q.shape[-1]))
    own = (texts[held][:, :, None] == texts[held][:, None]) & inside[:, None]
    weights = jax.nn.softmax(jnp.where(own[:, None], scores, _MASKED), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision).reshape(*held.shape, -1)
    y: jax.Array = jnp.zeros((tokens, width // 3), jnp.float32)
    return y.at[jnp.where(inside, places, tokens)].set(mixed, mode="drop")
