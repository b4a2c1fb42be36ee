"""The tensors of a Hugging Face BERT checkpoint, and the parameters they become.

Every name in the checkpoint is accounted for: used, known and left out, or reported.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .config import BertConfig
from .tensors import match as match_names

Array = np.ndarray[Any, Any]

_PREFIX = re.compile(r"^(bert|roberta)\.")
# Not used to embed: position numbers (a constant), the next-sentence pooler, the pre-training heads.
_LEFT_OUT = re.compile(r"^(embeddings\.(position_ids|token_type_ids)$|pooler\.|cls\.|lm_head\.)")

_TABLES = {
    "word": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "token_type": "embeddings.token_type_embeddings.weight",
}
_NORMS = {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"}
_PRODUCTS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attended": ("attention.output.dense",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
}


def canonical(name: str) -> str:
    """A tensor's name without the head's prefix, and with the norm's modern words."""
    name = _PREFIX.sub("", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def expected(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the encoder uses, in PyTorch's `(out, in)` order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    shapes: dict[str, tuple[int, ...]] = {
        name: (count, hidden) for name, count in zip(_TABLES.values(), rows, strict=True)
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config.num_layers):
        norms += [f"encoder.layer.{i}.{norm}" for norm in _NORMS.values()]
        for product, parts in _PRODUCTS.items():
            out, inside = {"up": (inner, hidden), "down": (hidden, inner)}.get(product, (hidden, hidden))
            for part in parts:
                shapes[f"encoder.layer.{i}.{part}.weight"] = (out, inside)
                shapes[f"encoder.layer.{i}.{part}.bias"] = (out,)
    for norm in norms:
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (hidden,)
    return shapes


def match(config: BertConfig, found: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Compare a checkpoint's names and shapes with what the encoder needs.

    Args:
        config: sizes and choices.
        found: shape by name, as the checkpoint spells it.

    Returns:
        The checkpoint's name by the encoder's name, and the names that are known and left out.

    Raises:
        TensorMismatch: names every missing, unexpected and wrongly shaped tensor at once.
    """
    return match_names(expected(config), found, canonical=canonical, left_out=_LEFT_OUT)


def assemble(config: BertConfig, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Arrange tensors as the parameters of `bert.apply`.

    Args:
        config: sizes and choices.
        tensors: float32 arrays by the encoder's names (see `expected`).

    Returns:
        Nested dict of float32 NumPy arrays: kernels `(layers, in, out)`, query, key and value joined.
    """
    layers: dict[str, dict[str, Array]] = {}
    prefixes = [f"encoder.layer.{i}." for i in range(config.num_layers)]
    for product, parts in _PRODUCTS.items():
        kernels = [np.concatenate([tensors[p + part + ".weight"] for part in parts]).T for p in prefixes]
        biases = [np.concatenate([tensors[p + part + ".bias"] for part in parts]) for p in prefixes]
        layers[product] = {"kernel": np.stack(kernels), "bias": np.stack(biases)}
    for norm, name in _NORMS.items():
        layers[norm] = {
            "scale": np.stack([tensors[f"{p}{name}.weight"] for p in prefixes]),
            "bias": np.stack([tensors[f"{p}{name}.bias"] for p in prefixes]),
        }
    first = {"scale": tensors["embeddings.LayerNorm.weight"], "bias": tensors["embeddings.LayerNorm.bias"]}
    return {"layers": layers, "norm": first, **{leaf: tensors[name] for leaf, name in _TABLES.items()}}
