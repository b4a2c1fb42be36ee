"""`servax doctor`: is this installation fit to serve, and if not, what mends it."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .doctor_checks import CHECKS, Found, run_check
from .exits import EXIT_FAILED, guarded

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    store: Annotated[
        str | None,
        typer.Option("--store", help="Directory or URL of stored programs. \\[default: the user's cache]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
) -> None:
    """Check the installation: versions, devices, store, disk, extras, and a tiny compile; 4 if it fails."""
    found = guarded(lambda: _examined(store, Console(stderr=True)))
    worst = verdict(found)
    if as_json:
        typer.echo(json.dumps({"verdict": worst, "checks": [one.to_json() for one in found]}, indent=2))
    else:
        Console().print(table_of(found))
    if worst == "fail":
        raise typer.Exit(EXIT_FAILED)


def _examined(store: str | None, console: Console) -> list[Found]:
    found = []
    with console.status("") as status:
        for check in CHECKS:
            status.update(f"checking {check.__name__.replace('_', ' ')}")
            found += run_check(check, store)
    return found


def verdict(found: Sequence[Found]) -> str:
    """The worst of all: `ok`, `warn` or `fail`."""
    return max((one.verdict for one in found), key=list(_STYLES).index, default="ok")


def table_of(found: Sequence[Found]) -> Table:
    """One row a check, with the remedy below what needs one."""
    words: dict[str, Any] = {
        "ok": "fit to serve",
        "warn": "fit to serve, with remarks",
        "fail": "not fit to serve",
    }
    worst = verdict(found)
    table = Table(title="servax doctor", caption=words[worst], caption_style=_STYLES[worst])
    table.add_column("check", no_wrap=True)
    table.add_column("verdict")
    table.add_column("found", overflow="fold")
    for one in found:
        text = one.detail if not one.remedy else f"{one.detail}\n→ {one.remedy}"
        table.add_row(one.check, f"[{_STYLES[one.verdict]}]{one.verdict}[/]", text.replace("[", "\\["))
    return table
