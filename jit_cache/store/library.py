"""Whose code a module is: an installed library's, known by name and version, or the user's own.

Code of libraries enters a fingerprint as its distribution, version and the digest of the file list that
the installer recorded, so a wheel rebuilt under the same version counts as another. Everything else, also
what is installed in editable mode, is the user's own and enters by content.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import site
import sys
import sysconfig
from typing import Any

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def owner(module_name: str | None) -> str | None:
    """The library a module belongs to, such as ``jax==0.10.2+4f0c…``; None for the user's own code.

    Nothing is imported to find out.
    """
    if not module_name or module_name == "__main__":
        return None
    top = module_name.partition(".")[0]
    return _owner(top, _path(module_name, top))


def _path(module_name: str, top: str) -> str | None:
    module = sys.modules.get(module_name) or sys.modules.get(top)
    if module is not None:
        path = getattr(module, "__file__", None)
        return path or next(iter(getattr(module, "__path__", ())), None)
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


@functools.lru_cache(maxsize=4096)
def _owner(top: str, path: str | None) -> str | None:
    if top in sys.stdlib_module_names and (path is None or _inside(path, _standard())):
        return f"python=={PYTHON}"
    return _distribution(top) if path is not None and _inside(path, _site()) else None


@functools.cache
def _distribution(top: str) -> str | None:
    names = [top]
    if not _provides(top, top):
        names = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
    return ",".join(map(_release, names)) or None


def _provides(name: str, top: str) -> bool:
    try:
        record = importlib.metadata.distribution(name).read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return re.search(rf"^{re.escape(top)}(/|\.py,|\.[\w-]+\.so,)", record, re.MULTILINE) is not None


@functools.cache
def _release(name: str) -> str:
    distribution = importlib.metadata.distribution(name)
    record = distribution.read_text("RECORD") or ""
    # Scripts carry this machine's paths, and bytecode is written later: neither counts.
    lines = sorted(line for line in record.splitlines() if re.search(r"^[^.\"][^,]*\.(py|so|pyd),", line))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{distribution.metadata['Name']}=={distribution.version}" + (f"+{digest}" if lines else "")


def release(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _standard() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib"))


@functools.cache
def _site() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    folders += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def _inside(path: str, folders: tuple[str, ...]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(folder + os.sep) for folder in folders)


def named_in_library(value: Any) -> str | None:
    """Where a library keeps a value under its own name, ``library:module.name``; None if it does not.

    True of functions, classes and such objects as `jax.numpy.add`: name and version say all about them.
    """
    module_name, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str):
        return None
    library = owner(module_name)
    if library is None:
        return None
    found: Any = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{library}:{module_name}.{name}" if found is value else None
