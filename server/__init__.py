"""Serving: admission, batching, the device thread, the Python API and the protocols over it."""

from .admission import QueueLimits
from .api import Server
from .device import BatchRecord
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
from .model import Model

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
    "Server",
    "ServerError",
    "TooLong",
    "TooManyRows",
    "Unavailable",
    "UnknownModel",
]
