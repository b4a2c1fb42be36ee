"""Steps that check guesses: a row's last token and tokens that may follow it, read together."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import rows as r
from .sampler import choose

_PER_ROW = ("ints", "floats", "bias_ids", "bias")


class Verified(NamedTuple):
    """What such a step says; as `Chosen`, with a leading axis of places in the chunk.

    Attributes:
        tokens: int32 `(chunk, rows)`, chosen after each place.
        finite: bool `(chunk, rows)`.
        logprobs: float32 `(chunk, rows)`.
        top_ids: int32 `(chunk, rows, n)`.
        top_logprobs: float32 `(chunk, rows, n)`.
        taken: int32 `(rows,)`: how many of a row's tokens stand: those behind guesses that were chosen as
            well, and the next one.
    """

    tokens: jax.Array
    finite: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    taken: jax.Array


def verify(
    step: Callable[..., Any], tops: int, params: Any, state: dict[str, Any], batch: Mapping[str, Any]
) -> tuple[Verified, dict[str, Any]]:
    """One step; `batch["guesses"]` is int32 `(rows, chunk - 1)`, of which a row's length says how many.

    A row with penalties has no guesses: they would need the counts of the tokens before.

    Args:
        step: `verify_step` of the model.
        tops: most likely tokens to report.
        params: of the model.
        state: donated, see `Programs.state_shapes`.
        batch: columns of `RowTable`, and guesses.
    """
    ints, guesses = batch["ints"], batch["guesses"]
    slots, lengths = ints[:, r.SLOT], ints[:, r.LENGTH]
    rows, chunk = guesses.shape[0], guesses.shape[1] + 1
    own = jnp.take(state["last"], slots, mode="clip")[:, None]
    logits, kv = step(
        params,
        state["kv"],
        ids=jnp.concatenate([own, guesses], axis=1),
        page_table=batch["page_table"],
        context_lengths=ints[:, r.CONTEXT],
        chunk_lengths=lengths,
    )
    place = jnp.arange(chunk, dtype=jnp.int32)
    each = {name: jnp.repeat(batch[name], chunk, axis=0) for name in _PER_ROW}
    each["ints"] = each["ints"].at[:, r.STEP].add(jnp.tile(place, rows))
    chosen = choose(logits.reshape(rows * chunk, -1), state["seen"], each, tops)
    tokens = chosen.tokens.reshape(rows, chunk)
    right = (tokens[:, :-1] == guesses) & (place[None, 1:] < lengths[:, None])
    samples = (ints[:, r.SAMPLE] > 0).astype(jnp.int32)
    taken = samples * (1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1))
    newest = jnp.take_along_axis(tokens, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
    sink = jnp.int32(state["last"].shape[0] - 1)
    last = state["last"].at[jnp.where(samples > 0, slots, sink)].set(newest)
    stands = (place[None] < taken[:, None]).astype(jnp.int32)
    seen = state["seen"].at[slots[:, None], tokens].add(stands)
    said = {
        name: jnp.moveaxis(x.reshape(rows, chunk, *x.shape[1:]), 1, 0) for name, x in chosen._asdict().items()
    }
    return Verified(**said, taken=taken), {"kv": kv, "last": last, "seen": seen}
