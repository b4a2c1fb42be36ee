"""servax: serve any JAX function at any shape, and never compile on the request path."""

from typing import TYPE_CHECKING

from ._lazy import attach
from ._version import __version__

if TYPE_CHECKING:
    from .jit_cache import PackedServable, Servable, bucketed, from_nnx
    from .server import Server
    from .server.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Client",
    "PackedServable",
    "Servable",
    "Server",
    "__version__",
    "bucketed",
    "from_nnx",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        ".jit_cache": ["PackedServable", "Servable", "bucketed", "from_nnx"],
        ".server": ["Server"],
        ".server.client": ["AsyncClient", "Client"],
    },
)
