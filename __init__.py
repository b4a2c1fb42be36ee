"""servax: serve any JAX function at any shape, and never compile on the request path."""

from ._version import __version__
from .jit_cache import Servable, from_nnx
from .server import Server

__all__ = ["Servable", "Server", "__version__", "from_nnx"]
