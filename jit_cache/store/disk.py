"""The files of a store's directory: whole or absent, never half.

::

    root/v1/<digest>.program     entries, one a file
    root/v1/.tmp-*               entries being written; locked by their writer
    root/leases/<digest>         who compiles what; see `lease`
    root/quarantine/             entries that were set aside, for a look by hand

Times of last use are the files' modification times, kept rising by hand: a wall clock that steps back
does not change what is oldest.
"""

import contextlib
import os
import secrets
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import StoreUnsafe
from .lease import lock_open_file, try_lock

_SUFFIX = ".program"
_TEMPORARY = ".tmp-"
_KEPT_IN_QUARANTINE = 16
_CHUNK_BYTES = 1 << 20


class Stored(NamedTuple):
    """One entry on disk: its digest, its size and when it was last used (nanoseconds, only to compare)."""

    digest: str
    nbytes: int
    used_ns: int


class Read(NamedTuple):
    """The bytes of an entry and which file they came from."""

    data: bytes
    file: tuple[int, int]


class Disk:
    """A store's directory.

    Methods raise `OSError` as the system gives it; the store decides what that means. Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "v1"
        self.leases = root / "leases"
        self.quarantined = root / "quarantine"
        self._lock = threading.Lock()
        self._last_ns = 0

    def prepare(self) -> None:
        """Make the directories that are missing.

        Raises:
            OSError: if one cannot be made.
        """
        # Private from the start: mkdir's mode does not reach parents, which are not ours.
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.entries, self.leases, self.quarantined):
            folder.mkdir(mode=0o700, exist_ok=True)

    def check_safe(self) -> None:
        """Refuse directories that others may write.

        Raises:
            StoreUnsafe: if group or others may.
            OSError: if a directory is there and cannot be looked at.
        """
        if os.name != "posix":
            return
        for folder in (self.root, self.entries):
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(folder.stat().st_mode)
                if mode & 0o022:
                    raise StoreUnsafe(
                        f"a store's directory is writable by its owner only, since loading a program runs "
                        f"it; {folder} has mode {mode:04o}: chmod go-w it, or use a new folder inside it"
                    )

    def path(self, digest: str) -> Path:
        """Where an entry is, or would be."""
        return self.entries / f"{digest}{_SUFFIX}"

    def read(self, digest: str) -> Read | None:
        """An entry's bytes; None if there is no such entry."""
        try:
            with open(self.path(digest), "rb") as file:
                status = os.fstat(file.fileno())
                return Read(file.read(), (status.st_dev, status.st_ino))
        except FileNotFoundError:
            return None

    def head(self, digest: str, nbytes: int) -> bytes:
        """The first bytes of an entry, at most so many; empty if there is no such entry."""
        with contextlib.suppress(FileNotFoundError), open(self.path(digest), "rb") as file:
            return file.read(nbytes)
        return b""

    def write(self, digest: str, data: bytes) -> None:
        """Put an entry in place, or leave all as it was: temporary file, fsync, rename."""
        try:
            self._write(digest, data)
        except FileNotFoundError:
            # The directory was removed, or a sweep met our file in the instant before it was locked.
            self.prepare()
            self._write(digest, data)

    def _write(self, digest: str, data: bytes) -> None:
        temporary = self.entries / f"{_TEMPORARY}{digest[:16]}-{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                lock_open_file(descriptor)  # tells a sweep that the writer lives
                view = memoryview(data)
                for start in range(0, len(data), _CHUNK_BYTES):
                    _write_all(descriptor, view[start : start + _CHUNK_BYTES])
                os.utime(temporary, ns=self._tick())
                os.fsync(descriptor)
                os.replace(temporary, self.path(digest))
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(self.entries)

    def touch(self, digest: str) -> None:
        """Say that an entry was used now."""
        os.utime(self.path(digest), ns=self._tick())

    def remove(self, digest: str) -> None:
        """Delete an entry; fine if it is gone."""
        self.path(digest).unlink(missing_ok=True)

    def set_aside(self, digest: str, kind: str, file: tuple[int, int] | None = None) -> bool:
        """Move an entry into quarantine, where the newest few are kept.

        Args:
            digest: which.
            kind: why, in one word; becomes part of the name.
            file: which file was found bad; another one that has taken its place meanwhile stays.

        Returns:
            Whether something was moved.
        """
        path = self.path(digest)
        try:
            status = path.stat()
            if file is not None and file != (status.st_dev, status.st_ino):
                return False
            os.replace(path, self.quarantined / f"{digest}.{kind}.{secrets.token_hex(4)}")
        except FileNotFoundError:
            return False
        for _, stale in sorted(_by_age(self.quarantined))[:-_KEPT_IN_QUARANTINE]:
            with contextlib.suppress(OSError):
                os.unlink(stale)
        return True

    def scan(self) -> list[Stored]:
        """All entries; files that vanish meanwhile are left out."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.entries) as listing:
            for item in listing:
                if not item.name.endswith(_SUFFIX) or item.name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    found.append(Stored(item.name.removesuffix(_SUFFIX), status.st_size, status.st_mtime_ns))
        with self._lock:
            self._last_ns = max((self._last_ns, *(one.used_ns for one in found)))
        return found

    def sweep(self) -> int:
        """Delete what dead writers left behind; returns how many files."""
        swept = 0
        for folder, prefix in ((self.entries, _TEMPORARY), (self.leases, "")):
            for path in sorted(folder.glob(f"{prefix}*")):
                # Who holds the lock lives; the file of a dead one can be locked by anybody.
                with contextlib.suppress(OSError):
                    if (descriptor := try_lock(path)) is not None:
                        path.unlink()
                        os.close(descriptor)
                        swept += 1
        return swept

    def empty_quarantine(self) -> int:
        """Delete what was set aside; returns how many files."""
        stale = [path for _, path in _by_age(self.quarantined)]
        for path in stale:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return len(stale)

    def _tick(self) -> tuple[int, int]:
        with self._lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns, self._last_ns


def _write_all(descriptor: int, view: memoryview) -> None:
    # A nearly full disk writes less than asked before it refuses.
    while view:
        view = view[os.write(descriptor, view) :]


def _by_age(folder: Path) -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as listing:
        for item in listing:
            with contextlib.suppress(FileNotFoundError):
                found.append((item.stat(follow_symlinks=False).st_ctime_ns, item.path))
    return found


def _sync_folder(folder: Path) -> None:
    # The rename itself is durable only once its directory is; not every platform can do it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
