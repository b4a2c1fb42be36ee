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
    from .api import Server
    from .batching.admission import QueueLimits
    from .batching.batch import BatchRecord
    from .hosting.model import Model
    from .hosting.refit import RefitPolicy

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
        ".batching.admission": ["QueueLimits"],
        ".api": ["Server"],
        ".batching.batch": ["BatchRecord"],
        ".hosting.model": ["Model"],
        ".hosting.refit": ["RefitPolicy"],
    },
)
