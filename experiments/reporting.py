"""What every script of this folder shares: the machine in words, JSON on disk, tables on the terminal."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What ran the numbers: cores, processor and versions; nothing that names the host."""
    import jax

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a result, replacing the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def print_table(
    title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], note: str | None = None
) -> None:
    """Print rows as a table.

    Args:
        title: Above the table.
        columns: From key to heading, with a format after a bar if any: `{"waste": "waste|.1%"}`.
        rows: Values by key; None prints as a dash.
        note: Below the table.
    """
    table = Table(title=title, caption=note, caption_justify="left")
    formats: dict[str, str] = {}
    for key, heading in columns.items():
        head, _, formats[key] = heading.partition("|")
        table.add_column(head, justify="right" if formats[key] else "left", no_wrap=not formats[key])
    for row in rows:
        table.add_row(*(_cell(row.get(key), formats[key]) for key in columns))
    Console(width=None if Console().is_terminal else 160).print(table)


def _cell(value: Any, how: str) -> str:
    if value is None:
        return "-"
    return format(value, how) if how else str(value)
