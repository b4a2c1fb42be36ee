"""What a BERT-family checkpoint says about itself: sizes, activation, pooling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, UnsupportedModel

# Hugging Face model types whose encoder has BERT's layout, and whether positions start after the
# padding id (RoBERTa and its children number the first token `pad_id + 1`).
_MODEL_TYPES = {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len")


@dataclass(frozen=True)
class BertConfig:
    """Sizes and choices of one BERT encoder; hashable, so it can key a cache.

    Attributes:
        vocab_size: rows of the word table.
        hidden_size: width of the model.
        num_layers: encoder layers.
        num_heads: attention heads; divides `hidden_size`.
        intermediate_size: width inside the feed-forward block.
        activation: Hugging Face name, one of `servax.models.bert_encoder.ACTIVATIONS`.
        layer_norm_eps: added to the variance before the square root.
        max_position_embeddings: rows of the position table.
        type_vocab_size: rows of the token-type table.
        pad_id: token id that stands for padding.
        position_offset: position number of the first token.
        pooling: how token vectors become one vector, one of `POOLINGS`.
        normalize: divide each pooled vector by its L2 norm.
        kernels: of `models.native`, that programs of this model may call; it tells their programs apart.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    pad_id: int = 0
    position_offset: int = 0
    pooling: str = "mean"
    normalize: bool = False
    kernels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "type_vocab_size",
        )
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(
                    f"{name} must be at least 1, got {getattr(self, name)}: correct config.json"
                )
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(
                f"num_heads must divide hidden_size, got {self.num_heads} heads for width "
                f"{self.hidden_size}: correct config.json"
            )
        if not 0 <= self.pad_id < self.vocab_size:
            raise UnsupportedModel(
                f"pad_id must be a row of the word table (0..{self.vocab_size - 1}), got {self.pad_id}: "
                "correct pad_token_id in config.json"
            )
        if self.max_tokens < 1:
            raise UnsupportedModel(
                f"max_position_embeddings must exceed the position offset {self.position_offset}, "
                f"got {self.max_position_embeddings}: correct config.json"
            )
        if self.pooling not in POOLINGS:
            raise UnsupportedModel(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def max_tokens(self) -> int:
        """The most tokens the position table can number."""
        return self.max_position_embeddings - self.position_offset


def from_huggingface(raw: Mapping[str, Any], *, pooling: str = "mean", normalize: bool = False) -> BertConfig:
    """Translate a Hugging Face `config.json`.

    Args:
        raw: the parsed file.
        pooling: one of `POOLINGS`.
        normalize: whether the pooled vector is divided by its L2 norm.

    Raises:
        UnsupportedModel: the model type or the kind of position embedding is not BERT's.
        CheckpointError: a size is missing or is no number.
    """
    kind = raw.get("model_type", "bert")
    if kind not in _MODEL_TYPES:
        raise UnsupportedModel(
            f"model_type must be one of {', '.join(_MODEL_TYPES)}, got {kind!r}: "
            "serve another architecture through your own apply function"
        )
    positions = raw.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UnsupportedModel(
            f"position_embedding_type must be 'absolute', got {positions!r}: "
            "serve this model through your own apply function"
        )
    pad_id = _number(raw, "pad_token_id", 0)
    return BertConfig(
        vocab_size=_number(raw, "vocab_size"),
        hidden_size=_number(raw, "hidden_size"),
        num_layers=_number(raw, "num_hidden_layers"),
        num_heads=_number(raw, "num_attention_heads"),
        intermediate_size=_number(raw, "intermediate_size"),
        activation=str(raw.get("hidden_act", "gelu")),
        layer_norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        max_position_embeddings=_number(raw, "max_position_embeddings"),
        type_vocab_size=_number(raw, "type_vocab_size", 2),
        pad_id=pad_id,
        position_offset=pad_id + 1 if _MODEL_TYPES[kind] else 0,
        pooling=pooling,
        normalize=normalize,
    )


def _number(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json must give {key} as an integer, got {value!r}: correct the file")
    return value
