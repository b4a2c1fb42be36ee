"""What a Llama-family checkpoint says about itself: sizes, rotary frequencies, biases and norms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, UnsupportedModel
from .rope import divisors

# Hugging Face model type: whether query, key and value have biases, and whether each head of query and
# key is normalised before the rotation.
_MODEL_TYPES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
MODEL_TYPES = tuple(_MODEL_TYPES)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of one decoder; hashable, so it can key a cache.

    Attributes:
        vocab_size: rows of the word table.
        hidden_size: width of the model.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: width of one head.
        intermediate_size: width inside the feed-forward block.
        max_tokens: the longest sequence, prompt and continuation together.
        rope_theta: base of the rotary frequencies.
        rope_divisors: `head_size / 2` numbers that divide the rotary frequencies, or empty for none.
        rms_norm_eps: added to the mean square before the root.
        qkv_bias: query, key and value have biases.
        qk_norm: each head of query and key is normalised before the rotation.
        tied: the word table is the output head too.
        eos_ids: tokens that end a text.
        bos_id: token that begins a text, if there is one.
        pad_id: token id that stands for padding.
        architecture: the checkpoint's own name of its kind.
        kernels: of `models.native`, that programs of this model may call; it tells their programs apart.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_tokens: int = 2048
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int = 0
    architecture: str = "llama"
    kernels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size"):
            _at_least_one(name, getattr(self, name))
        _at_least_one("intermediate_size", self.intermediate_size)
        _at_least_one("max_tokens", self.max_tokens)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads must divide num_attention_heads, got {self.num_kv_heads} for "
                f"{self.num_heads}: correct config.json"
            )
        if self.head_size % 2:
            raise UnsupportedModel(
                f"head_dim must be even to be rotated, got {self.head_size}: correct config.json"
            )
        if len(self.rope_divisors) not in (0, self.head_size // 2):
            raise UnsupportedModel(
                f"rotary divisors must be one for each of the {self.head_size // 2} frequencies, got "
                f"{len(self.rope_divisors)}: correct the checkpoint"
            )
        special = {"eos": self.eos_ids, "bos": () if self.bos_id is None else (self.bos_id,)}
        for kind, ids in {**special, "pad": (self.pad_id,)}.items():
            if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
                raise UnsupportedModel(
                    f"{kind} ids must be rows of the word table (0..{self.vocab_size - 1}), got {wrong}: "
                    f"correct {kind}_token_id"
                )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UnsupportedModel(f"{name} must be at least 1, got {value}: correct config.json")


def from_huggingface(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Translate a Hugging Face `config.json`.

    Args:
        raw: the parsed file.
        generation: the parsed `generation_config.json`, whose end tokens win.

    Raises:
        UnsupportedModel: the model type, activation, bias or kind of rotation is not computed here.
        CheckpointError: a size is missing or is no number.
    """
    kind = raw.get("model_type")
    if kind not in _MODEL_TYPES:
        raise UnsupportedModel(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {kind!r}")
    qkv_bias, qk_norm = _MODEL_TYPES[kind]
    _refuse_unsupported(raw)
    hidden, heads = _number(raw, "hidden_size"), _number(raw, "num_attention_heads")
    head = _number(raw, "head_dim", hidden // max(heads, 1))
    # Transformers 5 writes one dict, with the base inside; before, the base stood beside it.
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    window = raw.get("sliding_window") if raw.get("use_sliding_window", kind == "mistral") else None
    longest = _number(raw, "max_position_embeddings")
    eos = (generation or {}).get("eos_token_id")
    return LlamaConfig(
        vocab_size=_number(raw, "vocab_size"),
        hidden_size=hidden,
        num_layers=_number(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_number(raw, "num_key_value_heads", heads),
        head_size=head,
        intermediate_size=_number(raw, "intermediate_size"),
        # Within its window a sliding-window model equals a full one; beyond it, it is not computed here.
        max_tokens=longest if window is None else min(longest, window),
        rope_theta=theta,
        rope_divisors=divisors(rope, theta, head),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=_ids(raw.get("eos_token_id") if eos is None else eos),
        bos_id=next(iter(_ids(raw.get("bos_token_id"))), None),
        pad_id=_number(raw, "pad_token_id", 0),
        architecture=kind,
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    remedy = "serve this model through your own step function"
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act must be 'silu', got {activation!r}: {remedy}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModel(f"{key} must be false, got {raw[key]!r}: {remedy}")
    if (part := raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor must be 1, got {part!r}: {remedy}")


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool):
            raise CheckpointError(f"special token ids must be integers, got {item!r}: correct config.json")
    return tuple(values)


def _number(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json must give {key} as an integer, got {value!r}: correct the file")
    return value


def with_limit(stated: int, asked: int | None) -> int:
    """The longest sequence: the checkpoint's own, or a lower one that was asked for.

    Raises:
        CheckpointError: the asked one is not 1 to the checkpoint's.
    """
    if asked is None:
        return stated
    if not 1 <= asked <= stated:
        raise CheckpointError(
            f"max_tokens must be 1 to {stated}, the checkpoint's limit, got {asked}: lower it"
        )
    return asked
