"""How long programs ran, remembered beside them: a start from the store need not run each one again.

What they took of the memory, in MiB, is kept in the same way, under the digest and a word of its own.

Only hints for the planner, corrected by traffic; so the file is not signed, just checked for sense. It is
read once and replaced as a whole; of two processes that write at once one loses its news.
"""

import json
import math
import os
import secrets
import threading
from pathlib import Path

_LONGEST_S = 1e5


class Timings:
    """Seconds of one run, by the program's digest. Thread-safe; never raises for what is on disk.

    Args:
        path: the file; it need not exist. None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seconds = {} if path is None else _read(path)
        self._news: dict[str, float] = {}

    def get(self, digest: str) -> float | None:
        """Seconds of one run, or None if never measured."""
        with self._lock:
            return self._seconds.get(digest)

    def set(self, digest: str, seconds: float) -> None:
        """Remember a measurement; written by `save`."""
        with self._lock:
            self._seconds[digest] = self._news[digest] = seconds

    def save(self, known: frozenset[str]) -> bool:
        """Write what is new.

        Args:
            known: digests of the programs that are stored; the others are forgotten.

        Returns:
            Whether the file is up to date; False if it could not be written.
        """
        with self._lock:
            if not self._news or self._path is None:
                return True
            merged = _read(self._path) | self._news
            # A case of a stepped program is named by the program's digest and its number.
            kept = {digest: value for digest, value in merged.items() if digest.partition(":")[0] in known}
            draft = self._path.with_name(f".tmp-timings-{secrets.token_hex(8)}")
            try:
                draft.write_text(json.dumps(kept))
                os.replace(draft, self._path)
            except OSError:
                draft.unlink(missing_ok=True)
                return False
            self._news.clear()
            return True


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        digest: float(value)
        for digest, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value) and 0 < value < _LONGEST_S
    }
