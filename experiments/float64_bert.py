"""A BERT encoder in NumPy and float64, one text at a time and without padding: a reference."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models import BertConfig, bert
from .errors import ExperimentError

Array = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def random_params(config: BertConfig, seed: int) -> dict[str, Any]:
    """Weights of unit gain and norms around 1, as the tree of `bert.init`; nothing is compiled for it."""
    rng = np.random.default_rng(seed)

    def drawn(name: str, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: drawn(key, leaf) for key, leaf in tree.items()}
        noise = rng.standard_normal(tree.shape, np.float32)
        if name == "scale":
            return 1 + np.float32(0.1) * noise
        return noise * np.float32(tree.shape[-2] ** -0.5 if name == "kernel" else 0.3)

    return {name: drawn(name, leaf) for name, leaf in bert.shapes(config).items()}


def embed_float64(config: BertConfig, params: Mapping[str, Any], texts: Sequence[NDArray[np.int32]]) -> Array:
    """Mean-pooled vectors of texts.

    Args:
        config: sizes; mean pooling and `gelu`.
        params: the tree of `bert.init`.
        texts: int32 `(tokens,)` each, no padding.

    Returns:
        float64 `(texts, width)`, of unit length if the configuration says so.

    Raises:
        ExperimentError: if the configuration pools or activates in another way.
    """
    if (config.pooling, config.activation) != ("mean", "gelu"):
        raise ExperimentError(f"The reference is for mean pooling and gelu; got {config}.")
    vectors = np.stack([_encode(config, params, ids).mean(axis=0) for ids in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if config.normalize else vectors


def _encode(config: BertConfig, params: Mapping[str, Any], ids: NDArray[np.int32]) -> Array:
    def leaf(*path: Any) -> Array:
        at: Any = params
        for key in path:
            at = at[key]
        return np.asarray(at, np.float64)

    def norm(x: Array, scale: Array, bias: Array) -> Array:
        centred: Array = x - x.mean(-1, keepdims=True)
        root: Array = np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
        return centred / root * scale + bias

    places = np.arange(len(ids)) + config.position_offset
    x = leaf("word")[ids] + leaf("position")[places] + leaf("token_type")[0]
    x = norm(x, leaf("norm", "scale"), leaf("norm", "bias"))
    for i in range(config.num_layers):

        def linear(x: Array, name: str, i: int = i) -> Array:
            return x @ leaf("layers", name, "kernel", i) + leaf("layers", name, "bias", i)

        def normed(x: Array, name: str, i: int = i) -> Array:
            return norm(x, leaf("layers", name, "scale", i), leaf("layers", name, "bias", i))

        x = normed(x + linear(_attend(linear(x, "qkv"), config.num_heads), "attended"), "attention_norm")
        x = normed(x + linear(_gelu(linear(x, "up")), "down"), "output_norm")
    return x


def _attend(qkv: Array, heads: int) -> Array:
    length, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.reshape(length, 3, heads, width // heads).transpose(1, 2, 0, 3)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(width // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: Array = weights / weights.sum(-1, keepdims=True) @ v
    return mixed.transpose(1, 0, 2).reshape(length, width)


def _gelu(x: Array) -> Array:
    found: Array = 0.5 * x * (1.0 + _erf(x / np.sqrt(2.0)))
    return found
