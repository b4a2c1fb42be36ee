"""A Llama-family GGUF file as the same configuration and parameters that a Hugging Face folder gives."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import llama_weights
from .errors import CheckpointError, UnsupportedModel
from .gguf_file import GGUFFile
from .llama_config import LlamaConfig
from .rope import divisors

Array = np.ndarray[Any, Any]

# Architecture, and whether rows of q and k are stored in pairs (0, 1), (2, 3), ... instead of halves.
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    # Frequencies that the file's configuration already took in.
    "rope_freqs": "model.rotary_emb.inv_freq",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    if (part := _NAME.match(name)) and part[2] in _LAYER:
        return f"model.layers.{part[1]}.{_LAYER[part[2]]}.{part[3]}"
    stem, _, end = name.rpartition(".")
    if name == "rope_freqs.weight":
        return _TOP[stem]
    return f"{_TOP[stem]}.{end}" if stem in _TOP else name


def config(file: GGUFFile) -> LlamaConfig:
    """Translate the metadata.

    Raises:
        UnsupportedModel: another architecture, or a kind of rotation that is not computed here.
        CheckpointError: a value is missing or no number.
    """
    kind = file.metadata.get("general.architecture")
    if kind not in _INTERLEAVED:
        raise UnsupportedModel(
            f"general.architecture must be one of {', '.join(_INTERLEAVED)}, got {kind!r} in "
            f"{file.path.name}: serve this model through your own step function"
        )
    own = _Values(file, f"{kind}.")
    hidden, heads = own.number("embedding_length"), own.number("attention.head_count")
    head = own.number("attention.key_length", hidden // max(heads, 1))
    if (turned := own.number("rope.dimension_count", head)) != head:
        raise UnsupportedModel(f"all {head} features of a head must be rotated, got {turned}")
    theta = float(own.get("rope.freq_base", 10_000.0))
    word = file.tensors.get("token_embd.weight")
    window = own.get("attention.sliding_window", None)
    longest = own.number("context_length")
    return LlamaConfig(
        vocab_size=word.shape[0] if word else own.number("vocab_size"),
        hidden_size=hidden,
        num_layers=own.number("block_count"),
        num_heads=heads,
        num_kv_heads=own.number("attention.head_count_kv", heads),
        head_size=head,
        intermediate_size=own.number("feed_forward_length"),
        max_tokens=min(longest, window) if window else longest,
        rope_theta=theta,
        rope_divisors=_rope_divisors(file, own, theta, head),
        rms_norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-5)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=kind == "qwen3",
        tied="output.weight" not in file.tensors,
        architecture=kind,
        **_special_ids(file),
    )


class _Values:
    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._file, self._prefix = file, prefix

    def get(self, key: str, default: Any) -> Any:
        return self._file.metadata.get(self._prefix + key, default)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(
                f"{self._file.path.name} must give {self._prefix}{key} as one integer, got {value!r}: "
                "convert the model again"
            )
        return value


def _rope_divisors(file: GGUFFile, own: _Values, theta: float, head: int) -> tuple[float, ...]:
    if "rope_freqs.weight" in file.tensors:
        return tuple(float(d) for d in file.read_float32("rope_freqs.weight").reshape(-1))
    kind = own.get("rope.scaling.type", "none")
    scaling = {
        "rope_type": "default" if kind == "none" else kind,
        "factor": own.get("rope.scaling.factor", None),
    }
    return divisors(scaling, theta, head)


def _special_ids(file: GGUFFile) -> dict[str, Any]:
    ids = {
        kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        for kind in ("bos", "eos", "eot", "padding")
    }
    ends = [ids[kind] for kind in ("eos", "eot") if ids[kind] is not None]
    return {"eos_ids": tuple(dict.fromkeys(ends)), "bos_id": ids["bos"], "pad_id": ids["padding"] or 0}


def params(file: GGUFFile, config: LlamaConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read and arrange all weights as float32.

    Returns:
        The tree of `llama_weights.assemble`, and the names that are left out.

    Raises:
        TensorMismatch: names every missing, unexpected and wrongly shaped tensor.
    """
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    names, left_out = llama_weights.match(config, found, canonical=hugging_face_name)
    interleaved = _INTERLEAVED[config.architecture]

    def read(plain: str) -> Array:
        tensor = file.read_float32(names[plain])
        heads = _rotated_heads(config, plain) if interleaved else 0
        return in_halves(tensor, heads) if heads else tensor

    # NumPy lets go of the interpreter's lock in the large steps of dequantising.
    with ThreadPoolExecutor() as pool:
        tensors = dict(zip(names, pool.map(read, names), strict=True))
    return llama_weights.assemble(config, tensors), left_out


def _rotated_heads(config: LlamaConfig, name: str) -> int:
    heads: Mapping[str, int] = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return heads.get(name.rsplit(".", 2)[-2], 0)


def in_halves(rows: Array, heads: int) -> Array:
    """Undo the pairwise order of rows that llama.cpp rotates: per head, even rows first, then odd ones."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
