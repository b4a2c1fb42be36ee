"""A client of a servax server, or of any that speaks the same protocols: NumPy in, NumPy out.

Needs httpx alone (`pip install 'servax[client]'`) and never imports JAX.
"""

try:
    import httpx as _httpx  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "servax.Client needs httpx, and it is not installed: pip install 'servax[client]'"
    ) from error

from .aio import AsyncClient
from .answers import Choice, Completion, Embeddings, Inference, Usage
from .client import Client
from .clock import Clock, ManualClock, SystemClock
from .errors import BadAnswer, Unreachable
from .retry import Budget, Retry
from .stream import AsyncTextStream, TextStream

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "BadAnswer",
    "Budget",
    "Choice",
    "Client",
    "Clock",
    "Completion",
    "Embeddings",
    "Inference",
    "ManualClock",
    "Retry",
    "SystemClock",
    "TextStream",
    "Unreachable",
    "Usage",
]
