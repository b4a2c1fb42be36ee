"""BERT encoders as pure functions: embeddings of padded and of packed batches of texts.

Exact under padding: the ids of padding are replaced by the pad id, so that every place holds finite
numbers; to scores of padding such a negative number is added that any score is lost in its rounding and
the weight is exactly 0; and sums over tokens leave padding out by select. So what a padded place held
before cannot reach a real token, and a row that is only padding gives finite numbers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .bert_encoder import BertEncoder, Reach
from .config import BertConfig
from .errors import TooManyTokens
from .pooling import pool, pool_segments
from .pure import Pure

_ENCODERS: Pure[BertConfig, BertEncoder] = Pure(BertEncoder)
abstract, init, shapes, module = _ENCODERS.abstract, _ENCODERS.init, _ENCODERS.shapes, _ENCODERS.module


def _check_length(config: BertConfig, length: Any) -> None:
    # A symbolic length has no value yet; the bound is checked again for each concrete bucket.
    if isinstance(length, int) and length > config.max_tokens:
        raise TooManyTokens(
            f"length must be at most {config.max_tokens}, the positions this model has, got {length}: "
            "cut the text or lower the largest length bucket"
        )


def apply(
    config: BertConfig, params: Mapping[str, Any], *, ids: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """Embed a padded batch of texts. Pure; bind `config` with `functools.partial` before tracing.

    Args:
        config: sizes and choices.
        params: plain nested dict, as `init` gives it, or with kernels apart, in bfloat16 or int8.
        ids: int32 `(batch, length)` token ids with special tokens.
        mask: bool `(batch, length)`, True on real tokens, which may stand anywhere in the row.

    Returns:
        `{"embedding": float32 (batch, hidden)}`; zeros for a row without real tokens.

    Raises:
        TooManyTokens: a concrete `length` exceeds the model's positions.
    """
    _check_length(config, ids.shape[1])
    positions = jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1, 0)
    ids = jnp.where(mask, ids, jnp.int32(config.pad_id))
    model, kernels = module(config, params)
    reach = Reach.of(mask, mask[:, None, None, :])
    vectors = model(ids, positions, reach, kernels)
    return {"embedding": pool(vectors, mask, config.pooling, normalize=config.normalize)}


def apply_packed(
    config: BertConfig,
    params: Mapping[str, Any],
    *,
    ids: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    max_segments: int,
) -> dict[str, jax.Array]:
    """Embed several texts per row, kept apart by segment ids. Bind `config` and `max_segments` first.

    Args:
        config: sizes and choices.
        params: plain nested dict, as `init` gives it, or with kernels apart, in bfloat16 or int8.
        ids: int32 `(batch, length)`.
        segment_ids: int32 `(batch, length)`: 0 on padding, else 1 to `max_segments`.
        positions: int32 `(batch, length)`, from 0 at the start of each segment.
        max_segments: segments a row can hold.

    Returns:
        `{"embedding": float32 (batch, max_segments, hidden)}`; zeros for absent segments.
    """
    real = segment_ids > 0
    ids = jnp.where(real, ids, jnp.int32(config.pad_id))
    keep = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    model, kernels = module(config, params)
    reach = Reach.of(segment_ids, keep)
    vectors = model(ids, jnp.where(real, positions, 0), reach, kernels)
    pooled = pool_segments(vectors, segment_ids, max_segments, config.pooling, normalize=config.normalize)
    return {"embedding": pooled}
