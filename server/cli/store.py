"""`servax store`: what is kept between starts, whether it is whole, and why a program was not found."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .exits import EXIT_FAILED, guarded

if TYPE_CHECKING:
    from ...jit_cache.store import EntryInfo, Store

_SHOWN_DIGITS, _SHORT_DIGITS = 12, 6

T = TypeVar("T")
StoreAt = Annotated[
    str | None,
    typer.Option("--store", help="Directory or URL of stored programs. \\[default: the user's cache]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]

app = typer.Typer(
    name="store",
    help="Look into the store of compiled programs, check it, clean it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command("ls")
def ls(store: StoreAt = None, as_json: AsJson = False) -> None:
    """List the stored programs, the most recently used first; signatures are not checked."""
    root, entries = guarded(lambda: _read(store, lambda one: one.ls()))
    _show(root, entries, as_json)


@app.command()
def verify(store: StoreAt = None, as_json: AsJson = False) -> None:
    """Check every stored program wholly and set the bad ones aside; exit code 4 if there are any."""
    root, entries = guarded(lambda: _read(store, lambda one: one.verify()))
    _show(root, entries, as_json)
    if any(one.status != "ok" for one in entries):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def gc(
    store: StoreAt = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Keep so many bytes of the most recently used programs. \\[default: all]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete what dead writers left, what was set aside, and programs beyond a size."""
    root, deleted = guarded(lambda: _read(store, lambda one: one.gc(max_bytes)))
    if as_json:
        typer.echo(json.dumps({"store": root, "deleted": deleted}))
    else:
        _say(f"deleted {deleted} files of {root}")


@app.command()
def explain(
    first: Annotated[str, typer.Argument(metavar="A", help="Beginning of a program's digest.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Beginning of another one's.")],
    store: StoreAt = None,
    as_json: AsJson = False,
) -> None:
    """Say why two programs have different keys: each field that differs, - of A and + of B."""
    _, (one, other) = guarded(lambda: _read(store, lambda open_: (open_.find(first), open_.find(second))))
    from ...jit_cache.store import explain as explain_keys

    text = explain_keys(one, other)
    if as_json:
        typer.echo(json.dumps({"a": one.digest, "b": other.digest, "difference": text}, indent=2))
    else:
        _say(text)


def _read(location: str | None, ask: Callable[["Store"], T]) -> tuple[str, T]:
    """The store's directory and the answer to a question about it."""
    from ...jit_cache.store import Store

    check_location(location)
    opened = Store.open(location, readonly=not _is_there(location))
    return str(opened.root), ask(opened)


def check_location(location: str | None) -> None:
    """Refuse a URL that no installed library can open, at which a store would in silence be a local one.

    Raises:
        ConfigError: its scheme is unknown, or a package for it is missing.
    """
    scheme, divider, _ = (location or "").partition("://")
    if not divider or scheme == "file":
        return
    try:
        import fsspec  # type: ignore[import-untyped,unused-ignore]

        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"A store's URL needs fsspec and a package for its scheme, got {location!r}: {error}; "
            "correct it, or pip install 'servax[store]' and that package."
        ) from error


def _is_there(location: str | None) -> bool:
    # Looking into a store that was never filled makes none.
    from ...jit_cache.store import cache_home

    text = location or ""
    return ("://" in text and not text.startswith("file://")) or (
        Path(text.removeprefix("file://")).expanduser() if text else cache_home()
    ).is_dir()


def _show(root: str, entries: Sequence["EntryInfo"], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"store": root, "programs": [to_json(one) for one in entries]}, indent=2))
    elif not entries:
        _say(f"no programs in {root}")
    else:
        Console().print(entry_table(root, entries))


def to_json(entry: "EntryInfo") -> dict[str, Any]:
    """One stored program as plain values."""
    fields: Mapping[str, Any] = entry.fingerprint.fields if entry.fingerprint is not None else {}
    environment = fields.get("environment", {})
    return {
        "digest": entry.digest,
        "bytes": entry.nbytes,
        "status": entry.status,
        "bucket": fields.get("program", {}).get("bucket"),
        "model": str(fields.get("model", {}).get("code", ""))[:_SHOWN_DIGITS] or None,
        "jax": environment.get("jax"),
        "device": environment.get("device_kind"),
        "compile_s": entry.facts.get("compile_s"),
        "not_storable": entry.facts.get("not_storable"),
    }


def entry_table(root: str, entries: Sequence["EntryInfo"]) -> Table:
    """Stored programs as a table."""
    total = sum(one.nbytes for one in entries)
    # Narrow enough for 80 columns; --json has the whole of it.
    table = Table(title=f"{len(entries)} programs, {total / 1e6:.1f} MB in {root}")
    for heading in ("digest", "model", "bucket", "jax", "device"):
        table.add_column(heading, no_wrap=heading == "digest")
    for heading in ("kB", "compile s"):
        table.add_column(heading, justify="right", max_width=len("compile"))
    table.add_column("status", overflow="fold", min_width=len("unchecked"))
    for entry in entries:
        row = to_json(entry)
        bucket = "x".join(map(str, (row["bucket"] or {}).values()))
        seconds = "" if row["compile_s"] is None else f"{row['compile_s']:.2f}"
        status = f"not storable: {row['not_storable']}" if row["not_storable"] else row["status"]
        table.add_row(
            entry.digest[:_SHOWN_DIGITS],
            (row["model"] or "")[:_SHORT_DIGITS],
            bucket,
            row["jax"] or "",
            row["device"] or "",
            f"{entry.nbytes / 1e3:.0f}",
            seconds,
            status,
        )
    return table


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
