"""An encoder's weights in int8.

A few features of the residual stream are far larger than the others, at nearly every token, and take most of
the steps that a token has. An encoder normalises after it adds, so features cannot be turned as in
`quantize`. They are divided by the root of how far they reach before a token is rounded, and the weights
behind them multiplied (Xiao et al. 2022, SmoothQuant, arXiv:2211.10438). How far they reach is found without
sample texts, by running the encoder on tokens drawn at random: scale and bias of the norms do not tell.

1 - cosine of MiniLM's vectors to float32 in the mean: 5.4e-4, of which weights 3.4e-4; 1.0e-3 without
divisors, 1.0e-3 to 1.3e-3 with those that norms tell, 6.3e-4 with biases corrected by the mean error on drawn
tokens. Turning in blocks of 128 what qkv, up and down read gives 3.0e-4, and takes 4.8 ms of 12.2 at 8x64.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import panels_int8, vnni
from .bert_encoder import ACTIVATIONS
from .config import BertConfig
from .native import integers
from .offset import Offset
from .quantize import rounded
from .quantized import SMALLEST, Quantized

Array = np.ndarray[Any, Any]
# Texts and tokens that are drawn.
_ROWS, _LENGTH = 8, 32


def quantize(config: BertConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The same encoder with int8 kernels and words.

    Args:
        config: sizes and choices.
        params: float32 NumPy arrays, layers stacked, as `bert_weights.assemble` gives them; not changed.

    Returns:
        Parameters whose kernels are `Offset`, and whose table of words is `Quantized`.
    """
    factors = {name: 1 / _divisors(found) for name, found in reach(config, params).items()}
    layers = {name: dict(leaves) for name, leaves in params["layers"].items()}
    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock
        for name, leaves in layers.items():
            if "kernel" in leaves:
                leaves["kernel"] = _kernels(leaves["kernel"], factors.get(name), pool)
    with np.errstate(invalid="ignore"):  # a word that is not finite spoils its row alone
        word = Quantized(*rounded(params["word"]))
    return {**params, "layers": layers, "word": word}


def reach(config: BertConfig, params: Mapping[str, Any]) -> dict[str, Array]:
    """How far from 0 each feature gets that `qkv` and `up` read, float32 `(layers, hidden)`.

    In NumPy but for the activation: a sealed server loads models anew too, and `bert` would be traced.

    Args:
        config: sizes and choices.
        params: as for `quantize`.
    """
    shape = (_ROWS, min(_LENGTH, config.max_tokens))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    x = params["word"][ids] + params["position"][config.position_offset :][: shape[1]]
    x = _norm(config, x + params["token_type"][0], params["norm"])
    found: dict[str, list[Array]] = {"qkv": [], "up": []}
    for at in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, at=at: leaf[at], params["layers"])
        found["qkv"].append(np.fmax.reduce(np.abs(x), axis=(0, 1)))
        x = x + _linear(_attend(config, _linear(x, layer["qkv"])), layer["attended"])
        x = _norm(config, x, layer["attention_norm"])
        found["up"].append(np.fmax.reduce(np.abs(x), axis=(0, 1)))
        inner = ACTIVATIONS[config.activation](jnp.asarray(_linear(x, layer["up"])))
        x = _norm(config, x + _linear(np.asarray(inner), layer["down"]), layer["output_norm"])
    return {name: np.stack(each) for name, each in found.items()}


def _linear(x: Array, leaves: Mapping[str, Array]) -> Array:
    product: Array = x @ leaves["kernel"] + leaves["bias"]
    return product


def _norm(config: BertConfig, x: Array, leaves: Mapping[str, Array]) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + np.float32(config.layer_norm_eps))
    normed: Array = centred / spread * leaves["scale"] + leaves["bias"]
    return normed


def _attend(config: BertConfig, qkv: Array) -> Array:
    rows, length = qkv.shape[:2]
    parts = qkv.reshape(rows, length, 3, config.num_heads, config.head_size).transpose(2, 0, 3, 1, 4)
    scores = parts[0] @ parts[1].swapaxes(2, 3) / np.float32(math.sqrt(config.head_size))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ parts[2]
    joined: Array = mixed.transpose(0, 2, 1, 3).reshape(rows, length, config.hidden_size)
    return joined


def _kernels(stacked: Array, factors: Array | None, pool: ThreadPoolExecutor) -> Offset:
    """float32 `(layers, in, out)` to eight bits."""
    scaled = stacked if factors is None else stacked / factors[:, :, None]
    found = list(pool.map(lambda kernel: rounded(np.ascontiguousarray(kernel.T)), scaled))
    values, scales = zip(*found, strict=True)
    sums = [value.sum(axis=1, dtype=np.int32) for value in values]
    if integers.available():
        room = panels_int8.packed(values)
        lengths, totals = (panels_int8.columns(room, one) for one in (scales, sums))
        return Offset(room, lengths, totals, np.array(0, np.uint8), factors)
    unsigned = vnni.available() and vnni.fits(*values[0].shape)
    lowest = np.uint8(0) if unsigned else np.int8(-128)
    return Offset(values, np.stack(scales), np.stack(sums), np.array(lowest), factors)


def _divisors(found: Array) -> Array:
    """What features `(layers, in)` of such a reach are divided by, 1 in the geometric mean."""
    found = np.where(np.isfinite(found), found, 0)
    least = np.maximum(found.mean(axis=1, keepdims=True) / 100, SMALLEST)
    logs = np.log(np.maximum(found, least)) / 2
    divisors: Array = np.exp(logs - logs.mean(axis=1, keepdims=True))
    return divisors.astype(np.float32)
