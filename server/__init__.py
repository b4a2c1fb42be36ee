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
    DeviceFailed,
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
    from .batching.faults import FaultPolicy
    from .batching.pins import Pin, pinned
    from .hosting.model import Model
    from .hosting.refit import RefitPolicy
    from .layout import text_servable
    from .text import tokenized

__all__ = [
    "BadRequest",
    "BadTensor",
    "BatchRecord",
    "Cancelled",
    "Closed",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceFailed",
    "FaultPolicy",
    "Model",
    "ModelError",
    "NonFiniteInput",
    "NotReady",
    "Overloaded",
    "PayloadTooLarge",
    "Pin",
    "QueueLimits",
    "RefitPolicy",
    "Server",
    "ServerError",
    "TooLong",
    "TooManyRows",
    "Unavailable",
    "UnknownModel",
    "pinned",
    "text_servable",
    "tokenized",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        ".batching.admission": ["QueueLimits"],
        ".api": ["Server"],
        ".batching.batch": ["BatchRecord"],
        ".batching.pins": ["Pin", "pinned"],
        ".batching.faults": ["FaultPolicy"],
        ".hosting.model": ["Model"],
        ".hosting.refit": ["RefitPolicy"],
        ".layout": ["text_servable"],
        ".text": ["tokenized"],
    },
)
