"""servax: serve any JAX function at any shape, and never compile on the request path."""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .jit_cache import Servable, from_nnx
    from .server import Server

__all__ = ["Servable", "Server", "__version__", "from_nnx"]

# Resolved at the first use, so that servax.bucketing imports where there is only NumPy.
_HOMES = {"Servable": ".jit_cache", "from_nnx": ".jit_cache", "Server": ".server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
