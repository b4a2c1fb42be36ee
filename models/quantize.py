"""A decoder's weights in int8, turned first so that eight bits are enough.

The residual stream has a few features that are much larger than the others, and one scale a token then
leaves few steps for the rest. An orthogonal turn of the features spreads them (Ashkboos et al. 2024, QuaRot,
arXiv:2404.00456). Turns of the residual stream and of each head's values are multiplied into the weights that
write and read them, and cost nothing at run time; RMSNorm keeps its result under a turn once its scale has
moved into the weights behind it. What the last product of a layer reads is turned when it is computed.

Perplexity of SmolLM2-135M, relative to float32 (2,000 tokens of Wikipedia): 1.036 without turns, 1.005 with
them; weights alone in int8, 1.006 without and 1.002 with.
"""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from .llama_config import LlamaConfig
from .quantized import LARGEST, SMALLEST, Quantized

Array = np.ndarray[Any, Any]
_BLOCK = 64  # features that `down` reads turned together


def quantize(config: LlamaConfig, params: Mapping[str, Any]) -> tuple[LlamaConfig, dict[str, Any]]:
    """The same decoder with int8 tables and kernels.

    Args:
        config: sizes and choices.
        params: float32 NumPy arrays, layers stacked, as `llama.init` gives them.

    Returns:
        The configuration, with word table and head apart, since one is turned and the other scaled too; and
        parameters whose matrices are `Quantized`.
    """
    params = turned(config, params)
    layers = {name: dict(leaves) for name, leaves in params["layers"].items()}
    block = block_of(config.intermediate_size)
    for name in ("qkv", "attended", "gate_up", "down"):
        turn = hadamard(block) if name == "down" else None
        layers[name]["kernel"] = _kernels(layers[name]["kernel"], turn)
    tables = {name: Quantized(*rounded(params[name])) for name in ("word", "head")}
    return replace(config, tied=False), {**params, "layers": layers, **tables}


def turned(config: LlamaConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The same function with its features turned and the scales of its norms moved into the weights.

    Word table and head are apart afterwards, so `config.tied` must be false.
    """
    layers: dict[str, Any] = {name: dict(leaves) for name, leaves in params["layers"].items()}
    turn = orthogonal(config.hidden_size)
    for norm, name in (("input_norm", "qkv"), ("output_norm", "gate_up")):
        scale = layers[norm]["scale"]
        layers[name]["kernel"] = (turn.T * scale[:, None]) @ layers[name]["kernel"]
        layers[norm] = {"scale": np.ones_like(scale)}
    for name in ("attended", "down"):
        layers[name]["kernel"] = layers[name]["kernel"] @ turn
    _turn_values(config, layers)
    scale = params["norm"]["scale"]
    head = params["word"] if config.tied else params["head"]
    return {
        "word": params["word"] @ turn,
        "layers": layers,
        "norm": {"scale": np.ones_like(scale)},
        "head": head @ (scale[:, None] * turn),
    }


def _turn_values(config: LlamaConfig, layers: dict[str, Any]) -> None:
    """Turn each head's values, where they are made and where they are read."""
    heads, size = config.num_kv_heads, config.head_size
    turn = orthogonal(size)
    made = layers["qkv"] = dict(layers["qkv"])
    for name, leaf in made.items():
        other, values = np.split(leaf, [-heads * size], axis=-1)
        values = (values.reshape(*values.shape[:-1], heads, size) @ turn).reshape(values.shape)
        made[name] = np.concatenate([other, values], axis=-1)
    read = layers["attended"]["kernel"]
    by_head = read.reshape(config.num_layers, config.num_heads, size, -1)
    layers["attended"]["kernel"] = (turn.T @ by_head).reshape(read.shape)


def _kernels(kernels: Array, turn: Array | None) -> Quantized:
    """float32 `(layers, in, out)` to int8 `(out, in)` of each layer."""
    if turn is not None:
        by_block = kernels.reshape(len(kernels), -1, len(turn), kernels.shape[2])
        kernels = (turn.T @ by_block).reshape(kernels.shape)
    with ThreadPoolExecutor() as pool:  # NumPy works outside the lock
        pairs = list(pool.map(rounded, (np.ascontiguousarray(kernel.T) for kernel in kernels)))
    return Quantized(tuple(values for values, _ in pairs), tuple(scales for _, scales in pairs), turn)


def rounded(rows: Array) -> tuple[Array, Array]:
    """int8 of float32 `(rows, features)`, and a scale a row, by half of which a value is off at most."""
    highest = np.maximum(np.abs(rows).max(axis=1), np.float32(SMALLEST))
    scales = highest / np.float32(LARGEST)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales


@functools.cache
def orthogonal(size: int) -> Array:
    """A matrix drawn evenly from all orthogonal ones (Mezzadri 2006, arXiv:math-ph/0609050)."""
    q, r = np.linalg.qr(np.random.default_rng(0).standard_normal((size, size)))
    drawn: Array = (q * np.sign(np.diag(r))).astype(np.float32)
    return drawn


def hadamard(size: int) -> Array:
    """Sylvester's orthogonal matrix of ±1/√size; `size` is a power of two."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs / np.float32(size**0.5)


def block_of(size: int) -> int:
    """The largest power of two, at most `_BLOCK`, that divides `size`."""
    return min(_BLOCK, size & -size)
