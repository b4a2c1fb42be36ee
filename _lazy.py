"""Names of a package that are imported at their first use (PEP 562).

So that `servax.bucketing` imports where there is only NumPy, and the command line opens its socket before
JAX is imported.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: its ``__name__``.
        homes: names by the relative module that defines them, such as ``{".api": ["Server"]}``.

    Returns:
        The two functions, to be assigned in the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return getattribute, directory
