"""The BERT encoder (Devlin et al. 2018, arXiv:1810.04805) as a Flax NNX module; `bert` uses it."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from . import quantized, turned
from .apart import PRECISION, Apart, product
from .config import BertConfig
from .errors import UnsupportedModel
from .native import self_attention
from .quantized import Quantized
from .ragged import Ragged

# A score of less than 1e22 added to it changes no bit.
_MASKED = -1e30


def _gelu(x: jax.Array) -> jax.Array:
    # `jax.nn.gelu` computes erfc, whose two branches XLA:CPU both evaluates; erf is one polynomial.
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": lambda x: jnp.maximum(x, 0.0),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


class Reach(NamedTuple):
    """Which key each query may read, said twice; a program computes what it uses.

    Attributes:
        texts: int32 `(batch, length)`: the text of each token, whose tokens it reads; 0 for padding.
        bias: float32 `(batch, 1, 1 or length, length)`, which is added to the scores.
    """

    texts: jax.Array
    bias: jax.Array

    @classmethod
    def of(cls, texts: jax.Array, keep: jax.Array) -> "Reach":
        """From texts, and bool `(batch, 1, 1 or length, length)`."""
        return cls(texts.astype(jnp.int32), jnp.where(keep, 0.0, _MASKED))


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `(batch, length, size)` float32."""
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        scale, bias = self.scale[...][None, None], self.bias[...][None, None]
        return centred * jax.lax.rsqrt(variance + self.eps) * scale + bias


class Layer(nnx.Module):
    """One encoder layer: attention, feed-forward, each with a residual and a norm after it."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        linear = functools.partial(nnx.Linear, rngs=rngs, precision=PRECISION)
        # One product for query, key and value: 3 small ones leave cores idle in short buckets.
        self.qkv = linear(hidden, 3 * hidden)
        self.attended = linear(hidden, hidden)
        self.attention_norm = LayerNorm(hidden, config.layer_norm_eps)
        self.up = linear(hidden, inner)
        self.down = linear(inner, hidden)
        self.output_norm = LayerNorm(hidden, config.layer_norm_eps)
        self.config = config

    def __call__(self, x: jax.Array, reach: Reach | Ragged, layer: jax.Array, kernels: Apart) -> jax.Array:
        """Map `(batch, length, hidden)` to the same shape.

        Args:
            x: float32; `(1, tokens, hidden)` where padding was left out.
            reach: which key each query may read.
            layer: int32 scalar, which one this is.
            kernels: of all layers, where they are apart.
        """
        live = reach.live if isinstance(reach, Ragged) else None
        multiply = functools.partial(self._multiply, layer, kernels, live)
        x = self.attention_norm(x + multiply("attended", self._attend(multiply("qkv", x), reach)))
        inner = ACTIVATIONS[self.config.activation](multiply("up", x))
        return self.output_norm(x + multiply("down", inner))

    def _multiply(
        self, layer: jax.Array, kernels: Apart, live: jax.Array | None, name: str, x: jax.Array
    ) -> jax.Array:
        """Apply one of the linear maps, with its kernel here or apart, to so many tokens at least."""
        linear: nnx.Linear = getattr(self, name)
        if not kernels:
            return linear(x)
        y = product(kernels[name], layer, x, live)
        return y if linear.bias is None else y + linear.bias[...][None, None]

    def _attend(self, joined_qkv: jax.Array, reach: Reach | Ragged) -> jax.Array:
        batch, length = joined_qkv.shape[:2]
        heads, size = self.config.num_heads, self.config.head_size
        if isinstance(reach, Ragged):
            places = {"heads": heads, "longest": reach.longest}
            return self_attention.attend(joined_qkv[0], reach.texts, reach.starts, **places)[None]
        # One transpose for all three, and the division after the product with v, where it is `length`
        # over `size` times smaller: together 1.04x at 8x16, 1.07x at 8x64, 1.3x at 4x256 tokens/s. The
        # scale on the queries and a mask that is added: 1.04x at 8x64, 1.08x at 2x256; XLA:CPU's library
        # takes an addition into its attention, and leaves a select as a pass of its own over all scores.
        qkv = joined_qkv.reshape(batch, length, 3, heads, size).transpose(2, 0, 3, 1, 4)
        queries = qkv[0] * (1.0 / math.sqrt(size))
        scores = jnp.einsum("bhqd,bhkd->bhqk", queries, qkv[1], precision=PRECISION) + reach.bias
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, qkv[2], precision=PRECISION) / total
        return mixed.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


def _words(table: jax.Array, kernels: Apart, ids: jax.Array) -> jax.Array:
    """Rows of the table of words, which is in int8 where it is among the kernels."""
    if isinstance(words := kernels.get("word"), Quantized):
        return quantized.rows(words, ids.reshape(-1)).reshape(*ids.shape, -1)
    return turned.rows(table, ids)


class BertEncoder(nnx.Module):
    """Token ids to token vectors. Layers are stacked and scanned; their kernels are too, or apart.

    Against unrolled layers the scan gives an executable of a fifth of the size, which loads faster, and
    runs within 3 % of them from 8x16 up and 1.2x faster at 1x16 (MiniLM on 2 CPU cores).
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        if config.activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {config.activation!r}: "
                "serve this model through your own apply function"
            )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,))
        def stacked(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        def table(rows: int) -> nnx.Param[jax.Array]:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (rows, config.hidden_size)))

        self.word = table(config.vocab_size)
        self.position = table(config.max_position_embeddings)
        self.token_type = table(config.type_vocab_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = stacked(rngs)
        self.config = config

    def __call__(
        self, ids: jax.Array, positions: jax.Array, reach: Reach, kernels: Apart | None = None
    ) -> jax.Array:
        """Encode.

        Args:
            ids: int32 `(batch, length)`; ids outside the word table are clipped into it.
            positions: int32 `(batch, length)`, from 0.
            reach: which key each query may read.
            kernels: of all layers, where they are apart, and a table of words in int8.

        Returns:
            float32 `(batch, length, hidden)`.
        """
        if self_attention.fits(self.config.head_size):
            rows = Ragged.of(reach.texts)
            x = self._encode(rows.gathered(ids), rows.gathered(positions), rows, kernels or {})
            return rows.spread(x)
        return self._encode(ids, positions, reach, kernels or {})

    def _encode(
        self, ids: jax.Array, positions: jax.Array, reach: Reach | Ragged, kernels: Apart
    ) -> jax.Array:
        x = _words(self.word[...], kernels, ids)
        x = x + jnp.take(self.position[...], positions + self.config.position_offset, axis=0, mode="clip")
        x = self.norm(x + self.token_type[0][None, None])
        graph, stack = nnx.split(self.layers)

        def step(x: jax.Array, one: tuple[nnx.State[Any, Any], jax.Array]) -> tuple[jax.Array, None]:
            return nnx.merge(graph, one[0])(x, reach, one[1], kernels), None

        numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        return jax.lax.scan(step, x, (stack, numbers))[0]
