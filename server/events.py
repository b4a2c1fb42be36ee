"""What happened to programs: each compile and load once, with its cause; the last few are kept for people."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 200
_log = logging.getLogger("servax.programs")
_local = threading.local()


@dataclass(frozen=True, slots=True)
class ProgramEvent:
    """One program became ready, or something was compiled that is none of ours.

    Attributes:
        phase: `warmup`, `background`, `request` or `other`.
        source: `compiled`, or where it was loaded from, such as `store`.
        seconds: until it was ready.
        cause: why.
        model: its model; "" if unknown.
        bucket: its bucket; "" if unknown.
        code_bytes: size of the machine code; 0 if unknown.
        error: what went wrong, or None.
    """

    phase: str
    source: str
    seconds: float
    cause: str
    model: str = ""
    bucket: str = ""
    code_bytes: int = 0
    error: str | None = None


class Events:
    """The last events, oldest first; each is logged too. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[ProgramEvent] = deque(maxlen=KEPT)
        self._warned: deque[tuple[str, str]] = deque(maxlen=KEPT)

    def add(self, event: ProgramEvent) -> None:
        """Keep and log one."""
        with self._lock:
            self._events.append(event)
            level = logging.WARNING if event.phase == "request" else logging.INFO
            if event.error:
                # A fault of the model itself fails every bucket alike: one warning says it.
                alike = event.model, event.error.replace(event.bucket, "*") if event.bucket else event.error
                if alike not in self._warned:
                    level = logging.WARNING
                    self._warned.append(alike)
        _log.log(level, "program %s", "failed" if event.error else "ready", extra=asdict(event))

    def listed(self) -> Sequence[dict[str, Any]]:
        """All that are kept, as JSON."""
        with self._lock:
            return [asdict(event) for event in self._events]


@dataclass(frozen=True, slots=True)
class Making:
    """What a thread is making programs for.

    Attributes:
        cause: why; "" if nothing more is known than the phase of the thread.
        model: for which model; "" if unknown.
        bucket: for which bucket; "" for code of the model's own that is no bucket's program.
    """

    cause: str = ""
    model: str = ""
    bucket: str = ""


@contextlib.contextmanager
def making(cause: str, model: str = "", bucket: str = "") -> Iterator[None]:
    """Say what the calling thread compiles for, for the length of a block."""
    before = made_now()
    _local.making = Making(cause, model, bucket)
    try:
        yield
    finally:
        _local.making = before


def made_now() -> Making:
    """What the calling thread said that it compiles for."""
    found: Making = getattr(_local, "making", _NOTHING)
    return found


_NOTHING = Making()
REFIT = "a re-fit asked for a new bucket"
ASKED = "traffic asked for a bucket that was not warm"
NEW_VERSION = "a new version of the model was warmed"
FACTORY = "a reload ran the model's own code, which is no program of a bucket"
CAUSES = {
    "warmup": "warm-up of the grid",
    "background": "work in the background, once the server was warm",
    "request": "code on a request's way traced something; `servax serve` seals against that",
    "other": "code outside of the server compiled something",
}
