"""The store itself: programs by fingerprint, in a local directory with an optional copy elsewhere.

It never takes a server down. Bad entries are set aside and reported, disks that are full or read-only
cost one warning, and what cannot be read is simply compiled again. Only what looks like an attack on the
process, a directory or key that others can write, is an error, raised when the store is opened.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import EntryError, StoreError
from .disk import Disk, Stored
from .evict import choose
from .fingerprint import Fingerprint, explain, nearest
from .keyfile import Key, config_home, load_or_create, user_folder
from .lease import Lease, lease
from .program_entry import NOT_STORABLE, EntryInfo, StoredProgram, peek_info, take_out
from .remote import BUDGET_S, Remote
from .report import REFUSED, Ledger, StoreReport
from .shelf import Shelf
from .timings import Timings
from .trial import Trial, run_trial
from .trust import Trust


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where programs are kept by default: ``$XDG_CACHE_HOME/servax`` or ``~/.cache/servax``."""
    return user_folder(environ.get("XDG_CACHE_HOME"), ".cache")


class Store:
    """Compiled programs on disk; make one with `Store.open`. Thread-safe."""

    def __init__(self, shelf: Shelf, trust: Trust, max_bytes: int | None = None) -> None:
        self._shelf = shelf
        self._max_bytes = max_bytes
        self.trust = trust
        self.ledger = shelf.ledger
        self.timings = Timings(shelf.disk.root / "timings.json")

    @property
    def root(self) -> Path:
        """The local directory."""
        return self._shelf.disk.root

    @property
    def writable(self) -> bool:
        """Whether programs can be stored."""
        return self._shelf.key is not None and not self._shelf.readonly

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        max_bytes: int | None = None,
        readonly: bool = False,
        home: Path | None = None,
        local: Path | None = None,
        trial: Trial | None = run_trial,
        remote_budget_s: float = BUDGET_S,
    ) -> "Store":
        """Open a store, making what is missing.

        Args:
            location: a directory (default: `cache_home`), or any fsspec URL. A URL is a copy: programs are
                looked for in ``local`` first, written there and then sent.
            max_bytes: most bytes of entries; beyond it the least recently used leave, except those this
                process uses or has pinned.
            readonly: neither write, nor touch, nor set aside.
            home: where the signing key and the marks of trusted environments are; default `config_home`.
            local: the directory beside a URL, or without a location; default: `cache_home`.
            trial: how the first program of an unseen environment is tried; None trusts all.
            remote_budget_s: most seconds that a remote may cost without giving anything.

        Raises:
            StoreUnsafe: if others may write the directory or read the key.
        """
        ledger = Ledger()
        remote, folder = _split(location, local, ledger, remote_budget_s)
        disk = Disk(folder)
        home = home if home is not None else config_home()
        key: Key | None = None
        try:
            if not readonly:
                disk.prepare()
        except OSError as error:
            ledger.warn("write", f"the program store at {folder} cannot be written: {error}")
            readonly = True
        try:
            disk.check_safe()
            disk.scan()
            key = load_or_create(home / "store.key")
        except OSError as error:
            ledger.warn("write", f"the program store at {folder} cannot be used: {error}")
        shelf = Shelf(disk, key, ledger, remote, max_bytes=max_bytes, readonly=readonly)
        return cls(shelf, Trust(home, trial), max_bytes)

    def get(self, fingerprint: Fingerprint) -> StoredProgram | None:
        """Look a program up; checks everything before handing it out.

        Returns:
            The program, or a mark that it cannot be stored; None if there is nothing usable, in which case
            a bad entry was set aside and counts as refused.
        """
        return self._shelf.find(fingerprint)

    def put(self, fingerprint: Fingerprint, payload: bytes, facts: Mapping[str, Any] | None = None) -> bool:
        """Store a program, in place of what was there.

        Args:
            fingerprint: its key.
            payload: its bytes.
            facts: plain JSON values to keep beside it.

        Returns:
            Whether it is in the local directory now; if not, a warning says why.
        """
        return self._shelf.place(fingerprint, payload, facts or {})

    def mark_not_storable(self, fingerprint: Fingerprint, reason: str) -> bool:
        """Remember that a program cannot be stored here, so that no later start tries again."""
        return self._shelf.place(fingerprint, b"", {NOT_STORABLE: reason})

    def refuse(self, fingerprint: Fingerprint, kind: str, reason: str) -> None:
        """Set an intact entry aside that cannot be loaded, and count it as refused."""
        self.ledger.record(fingerprint.digest, REFUSED, reason)
        self._shelf.set_aside(fingerprint.digest, kind, None)

    @contextlib.contextmanager
    def lease(self, digest: str, timeout_s: float) -> Iterator[Lease]:
        """Hold the right to compile one program for the length of a block.

        Args:
            digest: the program's.
            timeout_s: most seconds to wait for another process that holds it.

        Yields:
            The lease. If it is not held, its reason says why, and one compiles all the same. Look into the
            store again before compiling: another process may just have finished.
        """
        if not self.writable:
            yield Lease(False, 0.0, "the store takes no entry")
            return
        with lease(self._shelf.disk.leases / digest, timeout_s) as mine:
            yield mine

    def pin(self, fingerprints: Iterable[Fingerprint]) -> None:
        """Say which programs this process plans to use, so that storing one does not evict another."""
        self._shelf.pins.update(one.digest for one in fingerprints)

    def save_timings(self) -> bool:
        """Write down the run times that were measured; False if the store takes nothing."""
        return self.writable and self.timings.save(frozenset(one.digest for one in self._shelf.disk.scan()))

    def report(self) -> StoreReport:
        """What became of the programs asked for so far."""
        return self.ledger.report()

    def flush(self, timeout_s: float = BUDGET_S) -> bool:
        """Wait for entries on their way to the remote copy; False if some were not sent in time."""
        return self._shelf.remote is None or self._shelf.remote.flush(timeout_s)

    def ls(self) -> list[EntryInfo]:
        """All entries, most recently used first; headers are read, signatures not checked."""
        return [
            peek_info(self._shelf.disk, one)
            for one in sorted(self._shelf.disk.scan(), key=lambda one: -one.used_ns)
        ]

    def find(self, prefix: str) -> Fingerprint:
        """The key of the one entry whose digest begins so.

        Raises:
            StoreError: if none or several do.
        """
        found = [one for one in self.ls() if one.digest.startswith(prefix) and one.fingerprint is not None]
        if len(found) != 1 or found[0].fingerprint is None:
            raise StoreError(
                f"a program is named by the beginning of its digest; {prefix!r} is that of {len(found)} in "
                f"{self.root}: list them, and give more digits"
            )
        return found[0].fingerprint

    def explain_miss(self, fingerprint: Fingerprint) -> str:
        """Why a program has no entry: how its key differs from the most similar one that is stored."""
        keys = [one.fingerprint for one in self.ls() if one.fingerprint is not None]
        closest = nearest(fingerprint, keys)
        return "the store is empty" if closest is None else explain(closest, fingerprint)

    def verify(self) -> list[EntryInfo]:
        """Check every entry wholly and set the bad ones aside; in order of digest.

        Without a key nothing can be checked: all are ``unchecked``.
        """
        return [self._verify(one) for one in sorted(self._shelf.disk.scan())]

    def _verify(self, one: Stored) -> EntryInfo:
        read = self._shelf.disk.read(one.digest)
        if self._shelf.key is None or read is None:
            return peek_info(self._shelf.disk, one)
        try:
            program = take_out(read.data, one.digest, self._shelf.key)
        except EntryError as error:
            self._shelf.set_aside(one.digest, error.kind, read.file)
            return EntryInfo(one.digest, one.nbytes, f"{error.kind}: {error}", None, {})
        return EntryInfo(one.digest, one.nbytes, "ok", program.fingerprint, program.facts)

    def gc(self, max_bytes: int | None = None) -> int:
        """Delete orphans, quarantined files and, beyond a cap, the least recently used entries.

        Args:
            max_bytes: most bytes to keep; default: the store's own cap, if it has one.

        Returns:
            How many files were deleted.
        """
        deleted = self._shelf.disk.sweep() + self._shelf.disk.empty_quarantine()
        cap = max_bytes if max_bytes is not None else self._max_bytes
        leaving = choose(self._shelf.disk.scan(), cap, 0, self._shelf.pins) if cap is not None else []
        for digest in leaving or []:
            self._shelf.disk.remove(digest)
        return deleted + len(leaving or [])


def _split(
    location: str | Path | None, local: Path | None, ledger: Ledger, budget_s: float
) -> tuple[Remote | None, Path]:
    """The remote copy, if the location is a URL of one, and the local directory."""
    text = str(location) if location is not None else ""
    folder = local if local is not None else cache_home()
    if text.startswith("file://"):
        return None, Path(text.removeprefix("file://"))
    if "://" in text:
        return Remote(text, ledger, budget_s), folder
    return None, Path(text).expanduser() if text else folder
