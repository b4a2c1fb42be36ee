"""servax: serve any JAX function at any shape, and never compile on the request path."""

from typing import TYPE_CHECKING

from ._lazy import attach
from ._version import __version__

if TYPE_CHECKING:
    from .jit_cache import Servable, bucketed, from_nnx
    from .server import Server

__all__ = ["Servable", "Server", "__version__", "bucketed", "from_nnx"]

__getattr__, __dir__ = attach(
    __name__, {".jit_cache": ["Servable", "bucketed", "from_nnx"], ".server": ["Server"]}
)
