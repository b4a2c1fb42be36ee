"""A Llama-family decoder (Touvron et al. 2023, arXiv:2302.13971) as a Flax NNX module, and its pure `step`.

RMSNorm, rotary positions, grouped queries and SwiGLU, with Qwen's biases and head norms as options. Exact
under padding by select: what stands in padded places, unused pages or other rows reaches no real token.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import paged, pages, panels, quantized, turned
from .apart import PRECISION, Apart, joined, product
from .chunk import Chunk, Mixed
from .errors import TooManyTokens
from .llama_config import LlamaConfig
from .pages import Cache, Past
from .panels import Panels
from .quantized import Quantized
from .ragged import up_to_last
from .rope import rotate


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise float32 `(..., size)`."""
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps) * scale


class Layer(nnx.Module):
    """One decoder layer: norm, attention, norm, feed-forward, with residuals around both."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
        linear = functools.partial(nnx.Linear, rngs=rngs, precision=PRECISION, use_bias=False)
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        # One product each for query, key, value and for gate, up: fewer, larger reads of weights.
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = linear(hidden, heads * size, use_bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)
        self.attended = linear(config.num_heads * size, hidden)
        self.output_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = linear(hidden, 2 * inner)
        self.down = linear(inner, hidden)
        self.config = config

    def __call__(
        self, x: jax.Array, layer: jax.Array, chunk: Chunk | Mixed, past: Past | None, apart: Apart
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map `(rows * chunk, hidden)` to the same shape, and give the chunk's keys and values."""
        multiply = functools.partial(self._multiply, layer, apart, chunk.live)
        q, k, v = self._heads(multiply("qkv", self.input_norm(x)), chunk)
        k, v = paged.as_held(past, k), paged.as_held(past, v)
        mixed = chunk.attend(past, layer, q, k, v)
        x = x + multiply("attended", mixed.transpose(0, 2, 1, 3).reshape(x.shape[0], -1))
        gate, up = jnp.split(multiply("gate_up", self.output_norm(x)), 2, axis=-1)
        return x + multiply("down", jax.nn.silu(gate) * up), (k, v)

    def _multiply(
        self, layer: jax.Array, apart: Apart, live: jax.Array, name: str, x: jax.Array
    ) -> jax.Array:
        """Apply one of the linear maps, with its kernel here or apart, to so many tokens at least."""
        linear: nnx.Linear = getattr(self, name)
        if not apart:
            return linear(x)
        y = product(apart[name], layer, x, live)
        return y if linear.bias is None else y + linear.bias[...][None]

    def _heads(self, joined: jax.Array, chunk: Chunk | Mixed) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        rows, length = chunk.positions.shape
        heads, kv_heads = config.num_heads, config.num_kv_heads
        joined = joined.reshape(rows, length, heads + 2 * kv_heads, config.head_size)
        q, k, v = jnp.split(joined.transpose(0, 2, 1, 3), (heads, heads + kv_heads), axis=1)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(part, chunk.cos[:, None], chunk.sin[:, None]) for part in (q, k))
        return q * (1.0 / math.sqrt(config.head_size)), k, v


class Decoder(nnx.Module):
    """Token ids to hidden vectors. Layers are scanned; their kernels are stacked, or apart.

    Unrolled layers run no faster, and copy the whole pool at each step unless its writing is made to depend
    on the last layer. The pool is read inside the scan and written once after it.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,))
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        def table() -> nnx.Param[jax.Array]:
            shape = (config.vocab_size, config.hidden_size)
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

        self.word = table()
        self.layers = stacked(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tied:
            self.head = table()
        self.config = config

    def __call__(
        self, ids: jax.Array, chunk: Chunk | Mixed, past: Past | None, kernels: Apart
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hidden vectors `(rows, length, hidden)`, and keys and values of all layers."""
        ids = jnp.where(chunk.real, ids, jnp.int32(self.config.pad_id))
        if isinstance(table := kernels.get("word"), Quantized):
            x = quantized.rows(table, ids.reshape(-1))
        elif isinstance(table, Panels):
            x = panels.rows(table, ids.reshape(-1))
        else:
            x = turned.rows(self.word[...], ids.reshape(-1))
        graph, stack = nnx.split(self.layers)

        def layer(x: jax.Array, one: tuple[nnx.State[Any, Any], jax.Array]) -> Any:
            return nnx.merge(graph, one[0])(x, one[1], chunk, past, kernels)

        numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        x, (k, v) = jax.lax.scan(layer, x, (stack, numbers))
        return x.reshape(*ids.shape, -1), k, v

    def logits(self, x: jax.Array, kernels: Apart, live: jax.Array) -> jax.Array:
        """Scores of all tokens, `(..., hidden)` to `(..., vocab)`, of so many vectors at least."""
        table = kernels.get("word" if self.config.tied else "head")
        if isinstance(table, Quantized):
            return quantized.scores(table, self.norm(x), live)
        if isinstance(table, Panels):
            return panels.scores(table, self.norm(x), live)
        head = self.word[...] if self.config.tied else self.head[...]
        return turned.scores(head, self.norm(x))


@functools.lru_cache(maxsize=64)
def abstract(config: LlamaConfig) -> tuple[Any, Any]:
    """The module's graph and its parameters' shapes, without allocating any."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def init(config: LlamaConfig, seed: int = 0) -> dict[str, Any]:
    """Random parameters as a plain nested dict of float32 arrays, layers stacked on axis 0."""
    return dict(nnx.to_pure_dict(nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]))


def shapes(config: LlamaConfig) -> dict[str, Any]:
    """The same tree as `init` gives, of `jax.ShapeDtypeStruct`."""
    return dict(nnx.to_pure_dict(abstract(config)[1]))


def _module(config: LlamaConfig, params: Mapping[str, Any]) -> tuple[Decoder, Apart]:
    """The module, and the kernels that are not in it."""
    graph, state = abstract(config)
    state = jax.tree.map(lambda leaf: leaf, state)
    here, there = joined(params, config.num_layers)
    nnx.replace_by_pure_dict(state, here)
    model: Decoder = nnx.merge(graph, state)
    return model, there


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
    model, kernels = _module(config, params)
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
    model, kernels = _module(config, params)
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
    model, kernels = _module(config, params)
    chunk = Chunk(config, jnp.zeros_like(lengths), lengths, ids.shape[1])
    return model.logits(model(ids, chunk, None, kernels)[0], kernels, chunk.live)
