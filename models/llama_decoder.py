"""A Llama-family decoder (Touvron et al. 2023, arXiv:2302.13971) as a Flax NNX module; `llama` uses it.

RMSNorm, rotary positions, grouped queries and SwiGLU, with Qwen's biases and head norms as options.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import paged, panels, quantized, turned
from .apart import PRECISION, Apart, product
from .chunk import Chunk, Mixed
from .llama_config import LlamaConfig
from .pages import Past
from .panels import Panels
from .quantized import Quantized
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
