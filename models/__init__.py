"""Model code and checkpoints: pure apply functions over plain parameter trees."""

from .config import POOLINGS, BertConfig
from .errors import (
    BadText,
    BadTokenIds,
    CheckpointError,
    HubUnavailable,
    InputError,
    LoadError,
    ModelNotFound,
    ModelsError,
    TensorMismatch,
    TooManyTokens,
    UnsupportedModel,
    WeightsNotInstalled,
)
from .registry import TextModel, load
from .tokenizer import TextTokenizer

__all__ = [
    "POOLINGS",
    "BadText",
    "BadTokenIds",
    "BertConfig",
    "CheckpointError",
    "HubUnavailable",
    "InputError",
    "LoadError",
    "ModelNotFound",
    "ModelsError",
    "TensorMismatch",
    "TextModel",
    "TextTokenizer",
    "TooManyTokens",
    "UnsupportedModel",
    "WeightsNotInstalled",
    "load",
]
