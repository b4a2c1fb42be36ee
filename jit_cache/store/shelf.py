"""Programs in and out of a directory and its remote copy, with every failure turned into a report."""

import contextlib
import errno
from collections.abc import Mapping
from typing import Any

from ..errors import EntryError
from .disk import Disk, Read
from .evict import choose
from .fingerprint import Fingerprint
from .keyfile import Key
from .program_entry import StoredProgram, put_in, take_out
from .remote import Remote
from .report import REFUSED, Ledger


class Shelf:
    """Where a store's entries are: a directory, its key, and a remote copy if there is one.

    No method raises because of a file system or a bad entry. Thread-safe.

    Attributes:
        pins: digests that this process uses or plans to use; never evicted by it.
        readonly: nothing is written, touched or moved; turns true when the system says so.
    """

    def __init__(
        self,
        disk: Disk,
        key: Key | None,
        ledger: Ledger,
        remote: Remote | None,
        *,
        max_bytes: int | None,
        readonly: bool,
    ) -> None:
        self.disk = disk
        self.key = key
        self.ledger = ledger
        self.remote = remote
        self.max_bytes = max_bytes
        self.readonly = readonly
        self.pins: set[str] = set()

    def find(self, fingerprint: Fingerprint) -> StoredProgram | None:
        """A program, from the directory or else from the copy; None if there is nothing usable."""
        digest = fingerprint.digest
        self.pins.add(digest)
        if self.key is None:
            return None
        if (read := self._read(digest)) is not None:
            stored = self._check(fingerprint, read.data, read.file)
            if stored is not None:
                self._touch(digest)
                return stored
        data = self.remote.fetch(self.disk.path(digest).name) if self.remote is not None else None
        if data is None:
            return None
        stored = self._check(fingerprint, data, None)
        if stored is not None:
            self._write(digest, data)
        return stored

    def _read(self, digest: str) -> Read | None:
        try:
            return self.disk.read(digest)
        except OSError as error:
            self.ledger.warn("read", f"the program store at {self.disk.root} cannot be read: {error}")
            return None

    def _check(
        self, fingerprint: Fingerprint, data: bytes, file: tuple[int, int] | None
    ) -> StoredProgram | None:
        digest = fingerprint.digest
        if self.key is None:
            return None
        try:
            stored = take_out(data, digest, self.key)
        except EntryError as error:
            self.ledger.record(digest, REFUSED, f"{error.kind}: {error}")
            self.ledger.warn(error.kind, f"a stored program was set aside, it is {error.kind}: {error}")
            if file is not None:
                self.set_aside(digest, error.kind, file)
            return None
        # Another program under the same digest is a miss, and stays until it is overwritten.
        return stored if stored.fingerprint.fields == fingerprint.fields else None

    def place(self, fingerprint: Fingerprint, payload: bytes, facts: Mapping[str, Any]) -> bool:
        """Store a program; False if it is not in the local directory afterwards, and a warning says why."""
        if self.key is None:
            return False
        digest = fingerprint.digest
        self.pins.add(digest)
        try:
            data = put_in(fingerprint, payload, facts, self.key)
        except (TypeError, ValueError) as error:
            self.ledger.warn("facts", f"facts beside a stored program are plain JSON values: {error}")
            return False
        written = self._write(digest, data)
        if self.remote is not None:
            self.remote.send(self.disk.path(digest).name, data)
        return written

    def _write(self, digest: str, data: bytes) -> bool:
        if self.readonly:
            return False
        try:
            if not self._make_room(digest, len(data)):
                return False
            self.disk.write(digest, data)
        except OSError as error:
            self.ledger.warn("write", f"the program store at {self.disk.root} takes no entry: {error}")
            self.readonly = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
            return False
        return True

    def _make_room(self, digest: str, nbytes: int) -> bool:
        if self.max_bytes is None:
            return True
        stored = [one for one in self.disk.scan() if one.digest != digest]
        leaving = choose(stored, self.max_bytes, nbytes, self.pins)
        if leaving is None:
            used = sum(one.nbytes for one in stored if one.digest in self.pins) + nbytes
            self.ledger.warn(
                "cap",
                f"the store's cap holds what one process uses; it is {self.max_bytes} bytes and the programs "
                f"in use need more than {used}: raise it, the rest is compiled at each start",
            )
            return False
        for one in leaving:
            self.disk.remove(one)
        return True

    def _touch(self, digest: str) -> None:
        if not self.readonly:
            with contextlib.suppress(OSError):  # only the order of eviction suffers
                self.disk.touch(digest)

    def set_aside(self, digest: str, kind: str, file: tuple[int, int] | None) -> None:
        """Move an entry into quarantine; see `Disk.set_aside`."""
        if not self.readonly:
            with contextlib.suppress(OSError):  # it stays in place and is overwritten
                self.disk.set_aside(digest, kind, file)
