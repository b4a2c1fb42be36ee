"""Stop signals: the first begins the drain, a later one ends the process, the same one heard twice does not.

Shells and supervisors often deliver a signal twice, to the process and to its group; nobody who wants to skip
the drain has decided so within a second.
"""

import os
from typing import Literal, NoReturn

INSISTS_AFTER_S = 1.0

Meaning = Literal["first", "echo", "insists"]


class StopSignals:
    """What each stop signal of a process means."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def heard(self, now_s: float) -> Meaning:
        """What the signal that is heard now means.

        Args:
            now_s: monotonic seconds.
        """
        if self._first_s is None:
            self._first_s = now_s
            return "first"
        return "insists" if now_s - self._first_s >= INSISTS_AFTER_S else "echo"


class Terminal:
    """The terminal that a process was started from; one signal tells both its end and the wish to reload.

    Once it hung up, what was connected to it is no terminal any more.
    """

    def __init__(self) -> None:
        self._on = [one for one in range(3) if os.isatty(one)]

    @property
    def hung_up(self) -> bool:
        """Whether there was one, and it is gone."""
        return bool(self._on) and not any(map(os.isatty, self._on))


def end_at_once(sig: int) -> NoReturn:
    """End the process with the code that shells give to a signal: what is in hand is given up, in silence.

    An orderly end would wait for what the operator no longer wants to wait for, and uvicorn would print a
    traceback of its own lifespan.
    """
    os._exit(128 + sig)
