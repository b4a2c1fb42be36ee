"""Attention to what a paged pool holds, called from JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from . import compiled, crew, header, pool
from .target import Tile, tile

# LLVM's name of a pool's type.
_KINDS = {"float32": "float", "float16": "half"}
# Scores of a page and a few queries are on a thread's stack.
_LARGEST_PAGE = 1024
_State = tuple[jax.Array, jax.Array, jax.Array]


def fits(values: jax.Array) -> bool:
    """Whether programs made here may call `attend` for that pool: its pages are whole vectors of its type."""
    return available(values.dtype.name) and _whole(values)


def _whole(values: jax.Array) -> bool:
    size, head = values.shape[-2:]
    vectors = size % tile().lanes == 0 and head % tile().lanes == 0
    return vectors and 0 not in values.shape and size <= _LARGEST_PAGE


def available(dtype: str) -> bool:
    """Whether pools of that type have a kernel: it compiles here, and a trial gives what it should."""
    with compiled.asking:
        return dtype in _KINDS and _available(dtype)


@functools.cache
def _available(dtype: str) -> bool:
    return compiled.usable("attention to a pool", functools.partial(_tried, dtype))


def attend(
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    q: jax.Array,
    state: _State,
) -> jax.Array:
    """Attention of queries to their row's tokens in the pool and to what they have read before.

    Args:
        keys: float32 or float16 `(layers, pages, kv_heads, head_size, page_size)`.
        values: of the same type, `(layers, pages, kv_heads, page_size, head_size)`.
        page_table: int32 `(rows, max_pages)`; pages are clipped into the pool.
        lengths: int32 `(rows,)`: tokens in the pool, clipped to what the table names.
        layer: int32 `()`, clipped into the pool.
        q: float32 `(rows, kv_heads, queries, head_size)`, scaled.
        state: float32 `(rows, kv_heads, queries)`, twice, and the shape of `q`: the highest score of what was
            read before, the sum of weights against it, and the mix of values.

    Returns:
        float32, the shape of `q`; a row's numbers depend on no other row.

    Raises:
        InputError: these sizes and types do not fit one another.
    """
    q, table, lengths = q.astype(jnp.float32), page_table.astype(jnp.int32), lengths.astype(jnp.int32)
    _check(keys, values, table, lengths, q, state)
    own = (part.astype(jnp.float32) for part in state)
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call: Any = jax.ffi.ffi_call(_target(values.dtype.name), shape)
    y: jax.Array = call(q, keys, values, table, lengths, jnp.int32(layer), *own)
    return y


def _check(
    keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array, q: jax.Array, state: _State
) -> None:
    """Refuse what the kernel would read past its ends: it takes all sizes from its operands."""
    layers, pages, kv, size, head = values.shape
    rows = q.shape[0]
    pool = _whole(values) and (keys.shape, keys.dtype) == ((layers, pages, kv, head, size), values.dtype)
    named = table.shape[:1] == lengths.shape == (rows,)
    own = tuple(part.shape for part in state) == (q.shape[:3], q.shape[:3], q.shape)
    if not (pool and named and own and (q.shape[1], q.shape[3]) == (kv, head)):
        raise InputError(
            "q, its state, the table and the pool must be of the same rows, kv heads and head size, which "
            f"`fits` takes, got q {q.shape}, state {[part.shape for part in state]}, table {table.shape}, "
            f"lengths {lengths.shape}, keys {keys.dtype}{keys.shape}, values {values.dtype}{values.shape}: "
            "give them as `paged.attend` does"
        )


def _target(dtype: str) -> str:
    """In each program that calls the kernel, so another kernel needs another one."""
    return f"servax_paged_attention_{dtype}_v1"


def handler(tile: Tile, dtype: str) -> compiled.Handler:
    """The kernel for one kind of machine and pools of one type.

    Raises:
        KernelUnavailable: there is none for this jaxlib.
    """
    layout = header.read()
    parts = [crew.source(layout, tile), pool.source(layout, tile, _KINDS[dtype])]
    return compiled.Handler(_target(dtype), "attend", parts)


def _tried(dtype: str) -> bool:
    compiled.register(handler(tile(), dtype))
    lanes = tile().lanes
    rng = np.random.default_rng(0)
    queries, head, length = 5, 2 * lanes, lanes + 3
    keys = rng.normal(size=(2, 3, 1, head, lanes)).astype(dtype)
    values = rng.normal(size=(2, 3, 1, lanes, head)).astype(dtype)
    q, mixed = rng.normal(size=(2, 1, 1, queries, head)).astype(np.float32)
    state = (np.zeros((1, 1, queries), np.float32), np.ones((1, 1, queries), np.float32), mixed)
    table = np.array([[2, 1]], np.int32)
    got = jax.jit(attend)(keys, values, table, np.array([length], np.int32), np.int32(1), q, state)
    weights = np.exp(np.einsum("qd,pdk->qpk", q[0, 0], keys[1, [2, 1], 0].astype(np.float32)))
    weights = weights.reshape(queries, -1)[:, :length]
    mix = mixed[0, 0] + weights @ values[1, [2, 1], 0].astype(np.float32).reshape(-1, head)[:length]
    wanted = mix / (1 + weights.sum(1, keepdims=True))
    return bool(np.allclose(np.asarray(got)[0, 0], wanted, rtol=1e-4, atol=1e-5))
