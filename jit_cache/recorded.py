"""Recorded requests: a file of JSON lines, one shape a line, that says what to warm first.

    {"rows": 3, "length": 17}
    {"length": 40, "count": 12, "model": "minilm"}

``rows`` and ``count`` default to 1; a line without ``model`` counts for every model that has its axes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import WarmupError
from .schedule import Shape

_KNOWN = ("rows", "count", "model")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of recorded requests holds.

    Attributes:
        lines: the sizes by axis of each good line, with ``rows``, ``count`` and, if it was there, ``model``.
        problems: what is wrong with each bad line, by its number.
    """

    lines: tuple[Mapping[str, Any], ...]
    problems: Mapping[int, str]

    def shapes(self, model: str, axes: Sequence[str]) -> list[Shape]:
        """What of it concerns a model.

        Args:
            model: its name.
            axes: its item axes.
        """
        wanted = set(axes)
        return [
            Shape(line["rows"], tuple(line[axis] for axis in axes), line["count"])
            for line in self.lines
            if line.get("model", model) == model and line.keys() - set(_KNOWN) == wanted
        ]


def read_recorded(path: Path, *, strict: bool = True) -> Recorded:
    """Read a file of recorded requests.

    Args:
        path: JSON lines, see above; empty lines are skipped.
        strict: a bad line is an error; otherwise it is in ``problems`` and left out.

    Raises:
        WarmupError: if the file cannot be read, holds no good line, or (strict) has a bad one, by number.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WarmupError(
            f"recorded requests are read before anything is warmed; {path.name} cannot be: {error}: check "
            f"the path, or warm up without it"
        ) from None
    lines: list[Mapping[str, Any]] = []
    problems: dict[int, str] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            lines.append(_parse(text))
        except ValueError as error:
            problems[number] = str(error)
    if problems and (strict or not lines):
        number, why = next(iter(problems.items()))
        raise WarmupError(
            f'each line of {path.name} is one shape, such as {{"rows": 3, "length": 17}}; line {number} '
            f"is not: {why} ({len(problems)} bad lines): correct it or leave it out"
        )
    if not lines:
        raise WarmupError(f"recorded requests hold at least one shape; {path.name} is empty: record some")
    return Recorded(tuple(lines), problems)


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"no object but {type(value).__name__}")
    line: dict[str, Any] = {"rows": 1, "count": 1.0, **value}
    if not isinstance(line.get("model", ""), str):
        raise ValueError(f"a model's name is text; got {line['model']!r}")
    count = line["count"]
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count < 1e15:
        raise ValueError(f"a count is a number above 0; got {count!r}")
    for name, size in line.items():
        if name in ("count", "model"):
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**53:
            raise ValueError(f"{name} is a whole number from 1 up; got {size!r}")
    return line
