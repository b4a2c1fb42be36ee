"""Attention over the pages of a pool, see `pages`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import native
from .native import paged_attention
from .pages import Past

_PRECISION = jax.lax.Precision.HIGHEST
_MASKED = float(np.finfo(np.float32).min)
# Rows that read their pages together on CPU: what is gathered for 8 stays in the processor's cache, and rows
# in the order of their length read few pages that only others have. 32 rows of a real mix of lengths: 16 to
# 20 ms a step at once, 15 to 16 in blocks of 16, 12 to 15 in blocks of 8 and 13 to 15 in blocks of 4.
_BLOCK = 8


def _pages(pool: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
    """One page a row. Whole pages as flat vectors: 1.2 to 1.7x faster on CPU than a gather of boxes."""
    layers, count, *page = pool.shape
    flat = pool.reshape(layers * count, -1)
    rows = jnp.take(flat, pages + layer * count, axis=0, mode="clip")
    return rows.reshape(-1, *page).astype(jnp.float32)


def as_held(past: Past | None, x: jax.Array) -> jax.Array:
    """Keys or values, rounded as the pool will hold them, so that where a chunk ends changes no answer.

    Numbers beyond what the pool's type holds become its largest; what is not a number stays so.
    """
    if past is None or past.cache["v"].dtype == x.dtype:
        return x
    finfo: Any = jnp.finfo  # which has no types
    kind = finfo(past.cache["v"].dtype)
    x = jnp.clip(x, float(kind.min), float(kind.max))
    return jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def attend(
    past: Past | None, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array
) -> jax.Array:
    """Attention of a chunk to itself and to its past, one page at a time with a running maximum.

    The sums are rescaled when a page raises the maximum (Milakov & Gimelshein 2018, arXiv:1805.02867), so a
    page is read once and stays in the processor's cache. The loop ends at the longest row's last page:
    time follows the tokens held and not `max_pages`. A page that is all masked for a row leaves the row's
    bits as they were, so the answer depends on neither the neighbours nor the width of the table. On CPUs
    a kernel does so without a copy of the pages, see `native.pool`.

    Args:
        past: the pool, or None for a chunk that is the whole sequence.
        layer: int32 `()`, which layer of the pool.
        q: float32 `(rows, heads, chunk, head_size)`, already scaled; heads that share a kv head adjoin.
        k: float32 `(rows, kv_heads, chunk, head_size)`.
        v: float32 `(rows, kv_heads, chunk, head_size)`.
        keep: bool `(rows, chunk, chunk)`: which key of the chunk each query may read; at least one each.

    Returns:
        float32 `(rows, heads, chunk, head_size)`.
    """
    rows, heads, chunk, size = q.shape
    groups = heads // k.shape[1]
    grouped = q.reshape(rows, k.shape[1], groups * chunk, size)
    state = _within(grouped, k, v, keep)
    mixed = _ended(state) if past is None else _with_past(past, layer, grouped, state)
    return mixed.reshape(rows, heads, chunk, size)


def attend_mixed(
    past: Past, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array, more: "More"
) -> jax.Array:
    """Attention of one token a row and of further tokens of some rows, to themselves and to the past.

    Args:
        past: the pool, with a table and a length for each row.
        layer: int32 `()`, which layer of the pool.
        q: float32 `(tokens, heads, 1, head_size)`, scaled: the rows' own tokens, then further ones.
        k: float32 `(tokens, kv_heads, 1, head_size)`.
        v: the same shape.
        keep: bool `(tokens, tokens)`: which token each may read; at least one each.
        more: whose past the further tokens read.

    Returns:
        float32 `(tokens, heads, 1, head_size)`.
    """
    tokens, heads, _, size = q.shape
    kv_heads, rows = k.shape[1], past.lengths.shape[0]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, size)

    def as_chunk(x: jax.Array) -> jax.Array:
        """`(tokens, kv_heads, groups, ...)` to `(1, kv_heads, groups * tokens, ...)`."""
        return jnp.moveaxis(x, 0, 2).reshape(1, kv_heads, -1, *x.shape[3:])

    def as_rows(x: jax.Array) -> jax.Array:
        """The way back."""
        return jnp.moveaxis(x.reshape(kv_heads, heads // kv_heads, tokens, *x.shape[3:]), 2, 0)

    # Values of all rows meet in one product, in which 0 times what is not finite would reach every row.
    finite = jnp.all(jnp.isfinite(v), axis=(1, 2, 3))
    spoiled = jnp.any(keep & ~finite[None], axis=1)
    v = jnp.where(finite[:, None, None, None], v, 0.0)
    state = [as_rows(part) for part in _within(as_chunk(grouped), as_chunk(k), as_chunk(v), keep[None])]
    highest, total, mixed = (part[:rows] for part in state)
    own = _with_past(past, layer, grouped[:rows], (highest, total, mixed))
    highest, total, mixed = (as_chunk(part[rows:]) for part in state)
    one = Past(
        past.cache,
        jax.lax.dynamic_slice_in_dim(past.page_table, more.row, 1),
        jnp.where(jnp.any(more.reads), jax.lax.dynamic_slice_in_dim(past.lengths, more.row, 1), 0),
    )
    reads = jnp.tile(more.reads, heads // kv_heads)[None]
    further = _with_past(one, layer, as_chunk(grouped[rows:]), (highest, total, mixed), reads)
    further = jnp.moveaxis(further.reshape(kv_heads, heads // kv_heads, tokens - rows, size), 2, 0)
    every = jnp.concatenate([own, further]).reshape(tokens, heads, 1, size)
    return jnp.where(spoiled[:, None, None, None], jnp.nan, every)


class More(NamedTuple):
    """Which of the further tokens of `attend_mixed` have a past: those of one row at most.

    Attributes:
        row: int32 `()`.
        reads: bool `(further,)`.
    """

    row: jax.Array
    reads: jax.Array


_State = tuple[jax.Array, jax.Array, jax.Array]
_Reads = jax.Array | None


def _within(grouped: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array) -> _State:
    """Attention of chunks to themselves: maximum and sum of the weights, and the mix of values."""
    groups = grouped.shape[2] // keep.shape[1]
    scores = jnp.einsum("rhqd,rhkd->rhqk", grouped, k, precision=_PRECISION)
    scores = jnp.where(jnp.tile(keep, (1, groups, 1))[:, None], scores, _MASKED)
    highest = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - highest[..., None])
    return highest, jnp.sum(weights, axis=-1), jnp.einsum("rhqk,rhkd->rhqd", weights, v, precision=_PRECISION)


def _ended(state: _State) -> jax.Array:
    return state[2] / state[1][..., None]


def _with_past(past: Past, layer: jax.Array, q: jax.Array, state: _State, reads: _Reads = None) -> jax.Array:
    """The mix of values of chunks and of their past; `reads`, bool `(rows, queries)`, says which have one."""
    k, v = past.cache["k"], past.cache["v"]
    if native.available() and paged_attention.fits(v):
        mixed = paged_attention.attend(k, v, past.page_table, past.lengths, layer, q, state)
        return mixed if reads is None else jnp.where(reads[:, None, :, None], mixed, _ended(state))
    return _ended(_attend_past(past, layer, q, state, reads))


def _attend_past(past: Past, layer: jax.Array, q: jax.Array, state: _State, reads: _Reads) -> _State:
    """In blocks of rows on CPU, each of which ends at its own longest row."""
    rows = q.shape[0]
    block = _BLOCK if jax.default_backend() == "cpu" else rows
    if rows <= block:
        return _attend_pages(past, layer, q, state, reads)
    parts = []
    for begin in range(0, rows, block):
        some = slice(begin, begin + block)
        held = Past(past.cache, past.page_table[some], past.lengths[some])
        own = (state[0][some], state[1][some], state[2][some])
        parts.append(_attend_pages(held, layer, q[some], own, None if reads is None else reads[some]))
    highest, total, mixed = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return highest, total, mixed


def _attend_pages(past: Past, layer: jax.Array, q: jax.Array, state: _State, reads: _Reads) -> _State:
    """A page of each row at a time; `reads`, bool `(rows, queries)`, says which queries do."""
    size = past.cache["v"].shape[3]
    width = past.page_table.shape[1]

    def page(j: jax.Array, state: _State) -> _State:
        highest, total, mixed = state
        pages = jax.lax.dynamic_index_in_dim(past.page_table, j, axis=1, keepdims=False)
        k, v = (_pages(past.cache[name], layer, pages) for name in ("k", "v"))
        held = (j * size + jnp.arange(size, dtype=jnp.int32))[None] < past.lengths[:, None]
        read = held[:, None, None]
        if reads is not None:
            read = read & reads[:, None, :, None]
        scores = jnp.einsum("rhqd,rhdp->rhqp", q, k, precision=_PRECISION)
        scores = jnp.where(read, scores, _MASKED)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
        shrink = jnp.exp(highest - higher)
        weights = jnp.exp(scores - higher[..., None])
        v = jnp.where(held[:, None, :, None], v, 0.0)  # 0 x NaN is NaN
        added = jnp.einsum("rhqp,rhpd->rhqd", weights, v, precision=_PRECISION)
        if reads is not None:
            added = jnp.where(reads[:, None, :, None], added, 0.0)
        return higher, total * shrink + jnp.sum(weights, axis=-1), mixed * shrink[..., None] + added

    used = jnp.minimum((jnp.max(past.lengths) + (size - 1)) // size, width)
    ended: _State = jax.lax.fori_loop(jnp.int32(0), used, page, state)
    return ended
