"""The tensors of a Hugging Face BERT checkpoint, and the parameters they become.

Every name in the checkpoint is accounted for: used, known and left out, or reported.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .config import BertConfig
from .errors import TensorMismatch

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
    wanted = expected(config)
    names: dict[str, str] = {}
    left_out: list[str] = []
    unexpected: list[str] = []
    for name in sorted(found):
        plain = canonical(name)
        if plain in wanted and plain not in names:
            names[plain] = name
        else:
            (left_out if _LEFT_OUT.match(plain) else unexpected).append(name)
    missing = tuple(name for name in wanted if name not in names)
    pairs = {
        names[plain]: (shape, tuple(found[names[plain]])) for plain, shape in wanted.items() if plain in names
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if missing or unexpected or wrong:
        raise _mismatch(missing, tuple(unexpected), wrong)
    return names, tuple(left_out)


def _mismatch(
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> TensorMismatch:
    def section(title: str, lines: Iterable[str]) -> str:
        lines = list(lines)
        return "".join([f"\n{len(lines)} {title}:", *(f"\n  {line}" for line in lines)]) if lines else ""

    shapes = (f"{name}: expected {want}, got {got}" for name, (want, got) in wrong.items())
    return TensorMismatch(
        "a checkpoint's tensors must be exactly those that its config.json describes, got "
        f"{len(missing)} missing, {len(unexpected)} unexpected and {len(wrong)} of the wrong shape: "
        "check that config.json and the weights belong together"
        + section("missing", missing)
        + section("unexpected", unexpected)
        + section("of the wrong shape", shapes),
        missing=missing,
        unexpected=unexpected,
        wrong=wrong,
    )


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
