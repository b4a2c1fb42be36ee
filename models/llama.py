"""Llama-family decoders as pure functions: steps over a paged pool, and whole sequences without one.

Exact under padding by select: what stands in padded places, unused pages or other rows reaches no real token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from . import pages
from .chunk import Chunk, Mixed
from .errors import TooManyTokens
from .llama_config import LlamaConfig
from .llama_decoder import Decoder
from .pages import Cache, Past
from .pure import Pure
from .ragged import up_to_last

_DECODERS: Pure[LlamaConfig, Decoder] = Pure(Decoder)
abstract, init, shapes, module = _DECODERS.abstract, _DECODERS.init, _DECODERS.shapes, _DECODERS.module


def step(
    config: LlamaConfig,
    params: Mapping[str, Any],
    kv: Cache,
    *,
    ids: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    chunk_lengths: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append a chunk of tokens to each row's sequence: prefill in chunks, or decode with chunks of 1.

    Pure; bind `config` with `functools.partial` before tracing, and donate `kv`.

    Args:
        config: sizes and choices.
        params: plain nested dict, as `init` or a checkpoint gives it, or `apart`.
        kv: the page pool, see `pages.shapes`; places that no row holds may contain anything.
        ids: int32 `(rows, chunk)`, real tokens first.
        page_table: int32 `(rows, max_pages)`; must name the pages of the chunk's positions too.
        context_lengths: int32 `(rows,)`: tokens of each row already in the pool.
        chunk_lengths: int32 `(rows,)`: real tokens in `ids`; 0 for a padded row, of which nothing is kept.

    Returns:
        Logits float32 `(rows, vocab)` after each row's last real token (finite and meaningless for a
        padded row), and the pool with the chunk in it.
    """
    past = Past(kv, page_table, context_lengths)
    return _appended(config, params, past, ids, chunk_lengths, every=False)


def verify_step(
    config: LlamaConfig,
    params: Mapping[str, Any],
    kv: Cache,
    *,
    ids: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    chunk_lengths: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append a chunk of tokens to each row's sequence, some of which may be taken back.

    Args:
        config: as of `step`.
        params: as of `step`.
        kv: as of `step`.
        ids: as of `step`.
        page_table: as of `step`.
        context_lengths: as of `step`.
        chunk_lengths: as of `step`.

    Returns:
        Logits float32 `(rows, chunk, vocab)` after each token (finite and meaningless on padding), and the
        pool. A later step whose context ends earlier writes over what is then behind it.
    """
    past = Past(kv, page_table, context_lengths)
    return _appended(config, params, past, ids, chunk_lengths, every=True)


def _appended(
    config: LlamaConfig,
    params: Mapping[str, Any],
    past: Past,
    ids: jax.Array,
    chunk_lengths: jax.Array,
    *,
    every: bool,
) -> tuple[jax.Array, Cache]:
    """Logits after every token of the chunks, or after each row's last real one, and the pool."""
    model, kernels = module(config, params)
    chunk = Chunk(config, past.lengths, chunk_lengths, ids.shape[1])
    x, k, v = model(ids, chunk, past, kernels)
    if not every:
        last = jnp.maximum(chunk_lengths - 1, 0)[:, None, None]
        x = jnp.take_along_axis(x, last, axis=1)[:, 0]
    live = chunk.live if every else up_to_last(chunk_lengths > 0)
    return model.logits(x, kernels, live), pages.write(past, k, v, chunk.positions, chunk.real)


def mixed_step(
    config: LlamaConfig,
    params: Mapping[str, Any],
    kv: Cache,
    *,
    ids: jax.Array,
    further_ids: jax.Array,
    further: jax.Array,
    reads: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    chunk_lengths: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append one token to each row's sequence and whole chunks to some: prompts are read while others decode.

    Tokens of all rows meet the weights together, and padding is that of the step and not of each row.

    Args:
        config: sizes and choices.
        params: as of `step`.
        kv: as of `step`.
        ids: int32 `(rows,)`: the last token of each row's chunk.
        further_ids: int32 `(further,)`: the tokens before it, of rows whose chunk has more than one.
        further: int32 `(2, further)`: the row of each of those, -1 for padding, and its place in the chunk.
        reads: int32 `()`: of the rows with further tokens only this one may have tokens in the pool.
        page_table: as of `step`.
        context_lengths: as of `step`.
        chunk_lengths: as of `step`.

    Returns:
        As `step`.
    """
    model, kernels = module(config, params)
    rows = ids.shape[0]
    mix = Mixed(config, context_lengths, chunk_lengths, further, reads)
    past = Past(kv, page_table, context_lengths)
    x, k, v = model(jnp.concatenate([ids, further_ids])[:, None], mix, past, kernels)
    tables = Past(kv, jnp.take(page_table, mix.row, axis=0, mode="clip"), mix.positions[:, 0])
    logits = model.logits(x[:rows, 0], kernels, up_to_last(chunk_lengths > 0))
    return logits, pages.write(tables, k, v, mix.positions, mix.real)


def forward(
    config: LlamaConfig, params: Mapping[str, Any], *, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Logits after every token of whole sequences, without a cache.

    Args:
        config: sizes and choices.
        params: plain nested dict, as `init` or a checkpoint gives it, or `apart`.
        ids: int32 `(rows, length)`, real tokens first.
        lengths: int32 `(rows,)`: real tokens.

    Returns:
        float32 `(rows, length, vocab)`; finite and meaningless on padding.

    Raises:
        TooManyTokens: `length` exceeds the model's limit.
    """
    if ids.shape[1] > config.max_tokens:
        raise TooManyTokens(
            f"length must be at most {config.max_tokens}, the model's limit, got {ids.shape[1]}: cut the text"
        )
    model, kernels = module(config, params)
    chunk = Chunk(config, jnp.zeros_like(lengths), lengths, ids.shape[1])
    return model.logits(model(ids, chunk, None, kernels)[0], kernels, chunk.live)
