"""Which tokens a step of a decoder reads: their positions, their turns, and which may read which."""

import jax
import jax.numpy as jnp

from . import paged
from .llama_config import LlamaConfig
from .pages import Past
from .ragged import up_to_last
from .rope import angles, frequencies


class Chunk:
    """What all layers share: positions, their turns, which token may read which, and how many there are.

    Args:
        config: sizes and choices.
        start: int32 `(rows,)`, position of the first token.
        lengths: int32 `(rows,)`, real tokens, which come first.
        length: tokens a row holds, padding included.
    """

    def __init__(self, config: LlamaConfig, start: jax.Array, lengths: jax.Array, length: int) -> None:
        place = jnp.arange(length, dtype=jnp.int32)
        self.positions = start[:, None] + place[None]
        self.real = place[None] < lengths[:, None]
        self.live = up_to_last(self.real)
        per_position = frequencies(config.rope_theta, config.head_size, config.rope_divisors)
        self.cos, self.sin = angles(self.positions, per_position)
        earlier = place[None, :, None] > place[None, None, :]
        # A token always reads itself, so that padding has something finite to read.
        self.keep = (earlier & self.real[:, None, :]) | (place[:, None] == place[None, :])[None]

    def attend(
        self, past: Past | None, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        """See `paged.attend`."""
        return paged.attend(past, layer, q, k, v, self.keep)


class Mixed:
    """The same for one token a row and further tokens of some rows, all as rows of one token.

    Args:
        config: sizes and choices.
        context: int32 `(rows,)`, tokens before each row's chunk.
        lengths: int32 `(rows,)`, real tokens of the chunk, of which the row's own token is the last.
        further: int32 `(2, count)`: row of each further token, -1 for padding, and its place in the chunk.
        reads: int32 `()`: the row whose further tokens have a past.
    """

    def __init__(
        self,
        config: LlamaConfig,
        context: jax.Array,
        lengths: jax.Array,
        further: jax.Array,
        reads: jax.Array,
    ) -> None:
        row = jnp.concatenate([jnp.arange(context.shape[0], dtype=jnp.int32), further[0]])
        place = jnp.concatenate([jnp.maximum(lengths - 1, 0), further[1]])
        real = jnp.concatenate([lengths > 0, further[0] >= 0])
        self.row = jnp.maximum(row, 0)
        self.positions = (jnp.take(context, self.row, mode="clip") + place)[:, None]
        self.real = real[:, None]
        self.live = up_to_last(real)
        per_position = frequencies(config.rope_theta, config.head_size, config.rope_divisors)
        self.cos, self.sin = angles(self.positions, per_position)
        earlier = (row[:, None] == row[None, :]) & (place[:, None] > place[None, :])
        self.keep = (earlier & real[None, :]) | jnp.eye(len(row), dtype=jnp.bool_)
        self.more = paged.More(reads, further[0] == reads)

    def attend(
        self, past: Past | None, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        """See `paged.attend_mixed`."""
        if past is None:
            raise TypeError("rows and further tokens are read over a pool; got none")
        return paged.attend_mixed(past, layer, q, k, v, self.keep, self.more)
