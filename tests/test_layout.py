"""The house: what ships, who imports whom, and which names are public."""

import ast
import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import servax

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("bucketing", "jit_cache", "models", "server", "experiments")
ALLOWED = {
    "bucketing": {"bucketing"},
    "jit_cache": {"jit_cache", "bucketing"},
    "models": {"models"},
    "server": {"server", "jit_cache", "bucketing"},
    "experiments": set(ROOMS),
}
# The one third-party rule that matters to users: bucketing works in a process that has only NumPy.
BUCKETING_THIRD_PARTY = {"numpy"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_rooms(path: Path) -> set[str]:
    """Rooms of ours that a file imports, relatively or by name."""
    rooms = set()
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            rooms.update(name.split(".")[0] for name in names if name)
        elif isinstance(node, ast.ImportFrom) and node.level == depth and depth:
            rooms.add(path.relative_to(ROOT).parts[0])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            rooms.update(name.split(".")[1] for name in names if name.startswith("servax."))
    return rooms & set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_whom_they_may(room: str) -> None:
    for path in modules(room):
        extra = imported_rooms(path) - ALLOWED[room]
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}; {room} may import {ALLOWED[room]}"


def test_no_private_jax() -> None:
    for path in ROOT.glob("*/**/*.py"):
        if ".venv" in path.parts[len(ROOT.parts)] or path == Path(__file__):
            continue
        assert "jax._src" not in path.read_text(), path


def test_wheel_holds_every_module() -> None:
    """A folder missing from pyproject's package list would be silently missing from the wheel."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        "servax." + ".".join(path.parent.relative_to(ROOT).parts) for room in ROOMS for path in modules(room)
    }
    assert set(packages) == folders | {"servax"}


def test_version_is_the_distributions() -> None:
    assert servax.__version__ == importlib.metadata.version("servax")


@pytest.mark.parametrize("room", [*ROOMS, ""])
def test_public_names_are_declared_once_and_exist(room: str) -> None:
    module = importlib.import_module(f"servax.{room}".rstrip("."))
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(module, name), name


def test_bucketing_imports_without_jax() -> None:
    """Only NumPy: anything else that bucketing pulled in would show in sys.modules of a fresh process."""
    code = (
        "import sys, importlib.util, types\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('jax', 'jaxlib', 'flax', 'ml_dtypes'):\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import servax.bucketing\n"
        "print(servax.bucketing.Ladder((8, 16)).rung_for(9))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "16"


def test_every_module_imports() -> None:
    for info in pkgutil.walk_packages(servax.__path__, "servax."):
        if ".tests" in info.name or info.name.endswith("__main__"):
            continue
        importlib.import_module(info.name)
