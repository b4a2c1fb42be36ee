"""Reading the sizes of a trace from CSV or JSON lines, with errors that name the line."""

import csv
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

DEFAULT_AXIS = "length"
Record = tuple[int, dict[str, Any]]


def read_sizes(path: Path, axis: str | None) -> tuple[str, NDArray[np.int64]]:
    """The sizes in one column of a trace, in the order of the file.

    Args:
        path: `.csv` with a header or `.jsonl` with one object a line, either of them gzipped or not.
        axis: The column; None takes `length`, or the only column that the file has.

    Returns:
        The column's name, and int64 `(n,)` sizes of at least 1.

    Raises:
        ConfigError: if the file, the column or a value is not as above; the message says what to do.
    """
    if not path.is_file():
        raise ConfigError(f"A trace must be a readable file; got {str(path)!r}. Check the path.")
    try:
        found = list(_records(path))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
        raise ConfigError(
            f"A trace must be UTF-8 text, gzipped if its name ends in .gz; {path.name} is not: {error}."
        ) from error
    if not found:
        raise ConfigError(f"A trace needs at least one request; {path.name} has none. Record some traffic.")
    column = _column(path, list(found[0][1]), axis)
    return column, np.array([_size(path, column, *record) for record in found], np.int64)


def _records(path: Path) -> Iterator[Record]:
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind not in ("csv", "jsonl"):
        raise ConfigError(
            f"A trace's name must end in .csv or .jsonl, then .gz if it is gzipped; got {path.name!r}."
        )
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
        yield from _csv(lines) if kind == "csv" else _json_lines(path, lines)


def _csv(lines: TextIO) -> Iterator[Record]:
    reader = csv.DictReader(lines)
    yield from ((reader.line_num, row) for row in reader)


def _json_lines(path: Path, lines: TextIO) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"Each line of {path.name} must be JSON; line {number} is not: {error}."
            ) from error
        # A bare number is a trace of one column.
        yield number, value if isinstance(value, dict) else {DEFAULT_AXIS: value}


def _column(path: Path, columns: list[str], axis: str | None) -> str:
    if axis is None and len(columns) == 1:
        return columns[0]
    wanted = DEFAULT_AXIS if axis is None else axis
    if wanted not in columns:
        raise ConfigError(
            f"The axis must be a column of {path.name}, which has {', '.join(columns)}; got {wanted!r}. "
            "Name one with --axis."
        )
    return wanted


def _size(path: Path, column: str, number: int, row: dict[str, Any]) -> int:
    value = row.get(column)
    try:
        size = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        size = math.nan
    if not (math.isfinite(size) and size == int(size) and 1 <= size < 2**53):
        shown = "nothing" if value is None else repr(value)
        raise ConfigError(
            f"Every {column} must be a whole number of at least 1; line {number} of {path.name} has {shown}. "
            "Correct the line, or leave it out: a server refuses such a request before it is padded."
        )
    return int(size)
