"""The tensors of a Llama-family checkpoint, by Hugging Face names, and the parameters they become."""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import tensors
from .llama_config import LlamaConfig

Array = np.ndarray[Any, Any]

_WORD, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PRODUCTS = {
    "qkv": _QKV,
    "attended": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"input_norm": "input_layernorm", "output_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
# Rotary frequencies are computed; a head that a tied model also writes down is its word table.
_FREQUENCIES = r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$"


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    q, kv = config.num_heads * size, config.num_kv_heads * size
    out = dict(zip(_QKV, (q, kv, kv), strict=True))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden) for name, rows in out.items()}
    if config.qkv_bias:
        shapes |= {f"{name}.bias": (rows,) for name, rows in out.items()}
    shapes |= {"self_attn.o_proj.weight": (hidden, q), "mlp.down_proj.weight": (hidden, inner)}
    shapes |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in _NORMS.values()}
    if config.qk_norm:
        shapes |= {f"{name}.weight": (size,) for name in _HEAD_NORMS.values()}
    return shapes


def expected(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the decoder uses, in PyTorch's `(out, in)` order."""
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{name}": shape
        for i in range(config.num_layers)
        for name, shape in _layer_shapes(config).items()
    }
    table = (config.vocab_size, config.hidden_size)
    heads = {} if config.tied else {_HEAD: table}
    return {_WORD: table, **shapes, _NORM: (config.hidden_size,), **heads}


def match(
    config: LlamaConfig,
    found: Mapping[str, tuple[int, ...]],
    canonical: Callable[[str], str] = lambda name: name,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Compare a checkpoint's names and shapes with what the decoder needs; see `tensors.match`."""
    left_out = re.compile(_FREQUENCIES + (rf"|^{re.escape(_HEAD)}$" if config.tied else ""))
    return tensors.match(expected(config), found, canonical=canonical, left_out=left_out)


def assemble(config: LlamaConfig, read: Mapping[str, Array]) -> dict[str, Any]:
    """Arrange tensors as the parameters of `llama.step`.

    Args:
        config: sizes and choices.
        read: float32 arrays by Hugging Face names (see `expected`).

    Returns:
        Nested dict of float32 NumPy arrays: kernels `(layers, in, out)`, with query, key, value and gate,
        up joined along `out`.
    """
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
    layers: dict[str, dict[str, Array]] = {}
    for product, parts in _PRODUCTS.items():
        rows = [read[f"{prefixes[0]}{part}.weight"].shape for part in parts]
        kernels = np.empty((config.num_layers, rows[0][1], sum(out for out, _ in rows)), np.float32)

        def fill(i: int, kernels: Array = kernels, parts: tuple[str, ...] = parts) -> None:
            found = [read[f"{prefixes[i]}{part}.weight"].T for part in parts]
            np.concatenate(found, axis=1, out=kernels[i])

        # Turning the weights round is half of the time to load; NumPy does it outside the lock.
        with ThreadPoolExecutor() as pool:
            list(pool.map(fill, range(config.num_layers)))
        layers[product] = {"kernel": kernels}
    if config.qkv_bias:
        biases = [np.concatenate([read[f"{prefix}{part}.bias"] for part in _QKV]) for prefix in prefixes]
        layers["qkv"]["bias"] = np.stack(biases)
    for norm, name in (_NORMS | (_HEAD_NORMS if config.qk_norm else {})).items():
        layers[norm] = {"scale": np.stack([read[f"{prefix}{name}.weight"] for prefix in prefixes])}
    heads = {} if config.tied else {"head": read[_HEAD]}
    return {"word": read[_WORD], "layers": layers, "norm": {"scale": read[_NORM]}, **heads}
