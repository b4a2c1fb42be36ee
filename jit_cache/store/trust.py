"""Which environments have shown on this host that their programs can be loaded.

An environment is the part of a fingerprint that says what runs programs (jaxlib, CPU, flags), with the
native functions a program calls. One trial for each, not one for each entry; the mark is a file in the
user's configuration directory. Once a trial has failed in this process the environment is suspect: every
further entry of it has a trial of its own, and no mark is made.
"""

import contextlib
import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .entry import canonical
from .fingerprint import Fingerprint
from .lease import lease
from .trial import Trial, TrialResult

_WAIT_S = 60.0


class Trust:
    """Marks of environments, and the trials that earn them. Thread-safe.

    Args:
        home: where the marks are.
        trial: runs a program in a child process; None trusts everything.
    """

    def __init__(self, home: Path, trial: Trial | None) -> None:
        self._folder = home / "trusted"
        self._trial = trial
        self._lock = threading.Lock()
        self._trusted: set[str] = set()
        self._suspect: set[str] = set()

    def check(self, fingerprint: Fingerprint, facts: Mapping[str, Any], payload: bytes) -> TrialResult:
        """Whether a program may be loaded; runs a trial if its environment has none behind it.

        Processes that ask at the same time share one trial.
        """
        name = environment_name(fingerprint, facts)
        if self._known(name):
            return TrialResult(True)
        with lease(self._folder / f"{name}.lease", _WAIT_S) if self._prepared() else contextlib.nullcontext():
            if self._known(name):
                return TrialResult(True)
            return self._run(name, payload)

    def try_now(self, fingerprint: Fingerprint, facts: Mapping[str, Any], payload: bytes) -> TrialResult:
        """Run a trial whatever is known of the environment."""
        return self._run(environment_name(fingerprint, facts), payload)

    def rehearse(self, fingerprint: Fingerprint, facts: Mapping[str, Any], payload: bytes) -> None:
        """Earn the mark with a program just compiled, so that the next start needs no trial.

        Does nothing if the environment is trusted or another process is at it.
        """
        name = environment_name(fingerprint, facts)
        if self._known(name) or name in self._suspect or not self._prepared():
            return
        with lease(self._folder / f"{name}.lease", 0.0) as mine:
            if mine.held and not self._known(name):
                self._run(name, payload)

    def _known(self, name: str) -> bool:
        if self._trial is None or name in self._trusted:
            return True
        with contextlib.suppress(OSError):
            if name not in self._suspect and (self._folder / name).exists():
                self._trusted.add(name)
                return True
        return False

    def _run(self, name: str, payload: bytes) -> TrialResult:
        if self._trial is None:
            return TrialResult(True)
        result = self._trial(payload)
        with self._lock:
            if not result.passed:
                self._suspect.add(name)
            elif result.proved and name not in self._suspect:
                self._trusted.add(name)
                # A home that cannot be written costs the next start one more trial.
                with contextlib.suppress(OSError):
                    (self._folder / name).touch(mode=0o600)
        return result

    def _prepared(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return False
        return True


def environment_name(fingerprint: Fingerprint, facts: Mapping[str, Any]) -> str:
    """The name of a program's environment: a digest of it and of the native functions it calls."""
    targets = canonical(sorted(facts.get("targets", ())))
    return hashlib.sha256(fingerprint.environment_digest.encode() + targets).hexdigest()
