"""What became of each program that was looked for in a store: loaded, compiled or refused."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_log = logging.getLogger(__name__)

LOADED = "loaded"
"""The program came from the store."""
COMPILED = "compiled"
"""There was no entry for it."""
REFUSED = "refused"
"""There was an entry and it could not be used; the program was compiled anew."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Counts since the store was opened; each program asked for is in exactly one of the three.

    Attributes:
        loaded: programs that came from the store.
        compiled: programs without an entry.
        refused: programs whose entry could not be used.
        reasons: why, by digest, for every program that was not loaded.
        warnings: everything worth a warning, each reason once.
    """

    loaded: int
    compiled: int
    refused: int
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def total(self) -> int:
        """Programs asked for."""
        return self.loaded + self.compiled + self.refused

    def __str__(self) -> str:
        text = f"loaded {self.loaded} of {self.total} programs from the store"
        if self.compiled:
            text += f", compiled {self.compiled}"
        if self.refused:
            text += f", refused {self.refused}"
        why = Counter(self.reasons.values()).most_common(3)
        return text + "".join(f"; {count} x {reason}" for reason, count in why)


class Ledger:
    """Collects outcomes and warnings. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[str, tuple[str, str]] = {}
        self._warnings: dict[str, str] = {}

    def record(self, digest: str, outcome: str, reason: str = "") -> None:
        """Say what became of a program; an entry that was refused stays counted as refused."""
        with self._lock:
            if self._outcomes.get(digest, ("", ""))[0] == REFUSED and outcome != LOADED:
                return
            self._outcomes[digest] = (outcome, reason)

    def reason(self, digest: str) -> str:
        """Why a program was not loaded; empty if nothing is known of it."""
        with self._lock:
            return self._outcomes.get(digest, ("", ""))[1]

    def warn(self, topic: str, message: str) -> None:
        """Log a warning, once for each topic; the first one stays in the report."""
        with self._lock:
            if topic in self._warnings:
                return
            self._warnings[topic] = message
        _log.warning("%s", message)

    def report(self) -> StoreReport:
        """Counts and reasons so far."""
        with self._lock:
            outcomes, warnings = dict(self._outcomes), list(self._warnings.values())
        counts = Counter(outcome for outcome, _ in outcomes.values())
        if counts[REFUSED] and not counts[LOADED]:
            reasons = Counter(reason for outcome, reason in outcomes.values() if outcome == REFUSED)
            warnings.append(
                f"loaded 0 of {len(outcomes)} programs; {counts[REFUSED]} stored ones were refused, most "
                f"often: {reasons.most_common(1)[0][0]}. They were compiled and stored anew"
            )
        return StoreReport(
            loaded=counts[LOADED],
            compiled=counts[COMPILED],
            refused=counts[REFUSED],
            reasons={digest: reason for digest, (outcome, reason) in outcomes.items() if outcome != LOADED},
            warnings=tuple(warnings),
        )
