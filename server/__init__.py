"""Serving: admission, batching, the device thread, the Python API and the protocols over it."""

from typing import TYPE_CHECKING

from .._lazy import attach
from .errors import (
    BadRequest,
    BadTensor,
    Cancelled,
    Closed,
    ConfigError,
    DeadlineExceeded,
    ModelError,
    NonFiniteInput,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    TooLong,
    TooManyRows,
    Unavailable,
    UnknownModel,
)

if TYPE_CHECKING:
    from .admission import QueueLimits
    from .api import Server
    from .batch import BatchRecord
    from .model import Model
    from .refit import RefitPolicy

__all__ = [
    "BadRequest",
    "BadTensor",
    "BatchRecord",
    "Cancelled",
    "Closed",
    "ConfigError",
    "DeadlineExceeded",
    "Model",
    "ModelError",
    "NonFiniteInput",
    "NotReady",
    "Overloaded",
    "PayloadTooLarge",
    "QueueLimits",
    "RefitPolicy",
    "Server",
    "ServerError",
    "TooLong",
    "TooManyRows",
    "Unavailable",
    "UnknownModel",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        ".admission": ["QueueLimits"],
        ".api": ["Server"],
        ".batch": ["BatchRecord"],
        ".model": ["Model"],
        ".refit": ["RefitPolicy"],
    },
)
