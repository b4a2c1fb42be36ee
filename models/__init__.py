"""Model code and checkpoints: pure apply functions over plain parameter trees."""

from .chat import ChatTemplate
from .config import POOLINGS, BertConfig
from .detokenize import Detokenizer
from .errors import (
    BadMessages,
    BadPool,
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
from .generation_tokenizer import GenerationTokenizer
from .generative import GenerativeModel
from .llama_config import LlamaConfig
from .panels import in_panels, matmul
from .ragged import Ragged
from .random_model import tiny
from .registry import TextModel, load
from .tokenizer import TextTokenizer

__all__ = [
    "POOLINGS",
    "BadMessages",
    "BadPool",
    "BadText",
    "BadTokenIds",
    "BertConfig",
    "ChatTemplate",
    "CheckpointError",
    "Detokenizer",
    "GenerationTokenizer",
    "GenerativeModel",
    "HubUnavailable",
    "InputError",
    "LlamaConfig",
    "LoadError",
    "ModelNotFound",
    "ModelsError",
    "Ragged",
    "TensorMismatch",
    "TextModel",
    "TextTokenizer",
    "TooManyTokens",
    "UnsupportedModel",
    "WeightsNotInstalled",
    "in_panels",
    "load",
    "matmul",
    "tiny",
]
