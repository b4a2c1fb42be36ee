"""A batch without its padding: the real tokens, one row behind another.

Kernels of `native` leave out the rows behind the last real one, so that a batch costs what its tokens cost,
whatever bucket it is in.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .errors import InputError


def up_to_last(real: jax.Array) -> jax.Array:
    """How many places there are up to the last real one, int32 scalar; `real` is bool, of any shape."""
    flat = real.reshape(-1)
    return jnp.max(jnp.where(flat, jnp.arange(1, flat.shape[0] + 1, dtype=jnp.int32), 0), initial=0)


class Ragged(NamedTuple):
    """Where the tokens of a batch lie once padding is left out.

    Attributes:
        texts: int32 `(tokens,)`: the text of each token, of as many as the batch has places.
        starts: int32 `(batch + 1,)`: where each row begins, and where the last ends.
        order: int32 `(tokens,)`: the place in the batch that each came from; None if none was moved.
        places: int32 `(batch, length)`: where each went; padding is at the last place.
    """

    texts: jax.Array
    starts: jax.Array
    order: jax.Array | None
    places: jax.Array | None

    @classmethod
    def of(cls, texts: jax.Array) -> "Ragged":
        """From the text of each place, int32 `(batch, length)`, 0 for padding.

        A single row stays as it is, up to its last token: padding mostly stands behind it.

        Raises:
            InputError: `texts` has another number of axes.
        """
        if texts.ndim != 2:
            raise InputError(f"texts must be (batch, length), got {texts.shape}: reshape them")
        texts = texts.astype(jnp.int32)
        real, flat = texts != 0, texts.reshape(-1)
        if texts.shape[0] == 1:
            return cls(flat, jnp.stack([jnp.int32(0), up_to_last(real)]), None, None)
        inside = jnp.cumsum(real, axis=1, dtype=jnp.int32)
        ends = jnp.cumsum(jnp.sum(real, axis=1, dtype=jnp.int32), dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        nowhere, numbers = flat.shape[0], jnp.arange(flat.shape[0], dtype=jnp.int32)
        places = jnp.where(real, starts[:-1, None] + inside - 1, nowhere)
        # Padding reads what stands last, which is padding too: a token of another row may not be finite.
        padding = jnp.max(jnp.where(real.reshape(-1), 0, numbers), initial=0)
        order = jnp.full_like(numbers, padding)
        order = order.at[places.reshape(-1)].set(numbers, mode="drop", unique_indices=True)
        return cls(flat[order], starts, order, jnp.minimum(places, nowhere - 1))

    @property
    def live(self) -> jax.Array:
        """How many tokens there are, int32 scalar."""
        return self.starts[-1]

    @property
    def longest(self) -> int:
        """Tokens that a row has at most."""
        return self.texts.shape[0] if self.places is None else self.places.shape[1]

    def gathered(self, values: jax.Array) -> jax.Array:
        """What belongs to places, `(batch, length, ...)`, as `(1, tokens, ...)`, padding behind.

        Raises:
            InputError: it belongs to other places.
        """
        places = (1, self.texts.shape[0]) if self.places is None else self.places.shape
        if values.shape[:2] != places:
            raise InputError(
                f"values must begin with {places}, as the texts, got {values.shape}: reshape them"
            )
        flat = values.reshape(1, -1, *values.shape[2:])
        return flat if self.order is None else flat[:, self.order]

    def spread(self, vectors: jax.Array) -> jax.Array:
        """The way back, `(1, tokens, ...)` to `(batch, length, ...)`; at padding that of some padding."""
        return vectors if self.places is None else vectors[0][self.places]
