"""A paged KV cache with static shapes: what a page looks like, and writing to pages.

Pages of all sequences lie in one pool, and a table says which pages hold a sequence (Kwon et al. 2023,
arXiv:2309.06180). Page 0 is the null page, which unused table entries name and nobody writes. Page 1 is
the sink, which takes what padding would write and nobody reads.

A page of keys is `(kv_heads, head_size, page_size)`, positions last, so that scores are plain products.

Page size is a trade of speed against memory and shared prefixes. A decode step of SmolLM2 at 32 rows and 512
tokens of context took 250, 203, 156 and 150 ms with pages of 16, 32, 64 and 128 tokens on 2 CPU cores, and
122, 111, 101 and 101 ms at 128 tokens of context: take 64 unless there is a reason.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .errors import BadPool
from .ragged import up_to_last

NULL_PAGE = 0
SINK_PAGE = 1
FIRST_PAGE = 2  # the first one that may hold a sequence

Cache = dict[str, jax.Array]


def shapes(
    layers: int, kv_heads: int, head_size: int, *, pages: int, page_size: int, dtype: Any = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """The pool: `k` `(layers, pages, kv_heads, head_size, page_size)`, `v` its last two swapped.

    Raises:
        BadPool: no page is left beside the null page and the sink, or a page holds nothing.
    """
    if pages <= FIRST_PAGE or page_size < 1:
        raise BadPool(
            f"a pool needs more than {FIRST_PAGE} pages (null and sink are two) of at least 1 token, got "
            f"{pages} pages of {page_size}: give it more memory"
        )
    front = (layers, pages, kv_heads)
    return {
        "k": jax.ShapeDtypeStruct((*front, head_size, page_size), dtype),
        "v": jax.ShapeDtypeStruct((*front, page_size, head_size), dtype),
    }


class Past(NamedTuple):
    """What the pool holds of the rows' sequences.

    Attributes:
        cache: the pool.
        page_table: int32 `(rows, max_pages)`; entry `j` of a row is the page of positions
            `j * page_size` and on, or `NULL_PAGE`.
        lengths: int32 `(rows,)`: tokens in the pool; places from there on may hold anything, NaN too.
    """

    cache: Cache
    page_table: jax.Array
    lengths: jax.Array


def write(past: Past, k: jax.Array, v: jax.Array, positions: jax.Array, real: jax.Array) -> Cache:
    """Put a chunk's keys and values of all layers into the rows' pages.

    A loop of in-place updates, one token each: with the pool donated nothing of it is copied.

    Args:
        past: the pool and its tables.
        k: float32 `(layers, rows, kv_heads, chunk, head_size)`.
        v: the same shape.
        positions: int32 `(rows, chunk)`.
        real: bool `(rows, chunk)`; what is not real, or has no entry in the table, goes to the sink, if
            anywhere.

    Returns:
        The pool with the tokens in it.
    """
    size = past.cache["v"].shape[3]
    width = past.page_table.shape[1]
    slot = positions // size
    named = jnp.take_along_axis(past.page_table, jnp.clip(slot, 0, width - 1), axis=1)
    pages = jnp.where(real & (slot < width), named, SINK_PAGE).reshape(-1)
    offsets = (positions % size).reshape(-1)
    layers, rows, heads, chunk, head = k.shape

    def by_token(x: jax.Array, kind: str) -> jax.Array:
        x = x.transpose(1, 3, 0, 2, 4).reshape(rows * chunk, layers, 1, heads, head)
        return x.astype(past.cache[kind].dtype)

    keys, values = by_token(k, "k"), by_token(v, "v")

    def put(i: jax.Array, cache: Cache) -> Cache:
        page, offset, zero = pages[i], offsets[i], jnp.int32(0)
        return {
            "k": jax.lax.dynamic_update_slice(
                cache["k"], keys[i][..., None], (zero, page, zero, zero, offset)
            ),
            "v": jax.lax.dynamic_update_slice(
                cache["v"], values[i][:, :, :, None], (zero, page, zero, offset, zero)
            ),
        }

    # Padding behind all tokens is not even brought to the sink. Elsewhere a loop of unknown length would be
    # asked at each turn whether it ends.
    count = up_to_last(real) if jax.default_backend() == "cpu" else rows * chunk
    written: Cache = jax.lax.fori_loop(0, count, put, past.cache)
    return written


def copy_pages(cache: Cache, *, source: jax.Array, target: jax.Array) -> Cache:
    """Copy whole pages, for a sequence that is about to write to a page it shares.

    Args:
        cache: the pool; donate it.
        source: int32 `(count,)`; pad with `NULL_PAGE`.
        target: int32 `(count,)`; pad with `SINK_PAGE`.
    """

    def put(i: jax.Array, cache: Cache) -> Cache:
        moved = {name: jax.lax.dynamic_index_in_dim(pool, source[i], axis=1) for name, pool in cache.items()}
        return {
            name: jax.lax.dynamic_update_index_in_dim(pool, moved[name], target[i], axis=1)
            for name, pool in cache.items()
        }

    copied: Cache = jax.lax.fori_loop(0, source.shape[0], put, cache)
    return copied
