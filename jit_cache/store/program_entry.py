"""What an entry means: a program, its key and facts, on top of the checked bytes of `entry`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import EntryError, FingerprintError
from . import entry
from .disk import Disk, Stored
from .fingerprint import Fingerprint
from .keyfile import Key

NOT_STORABLE = "not_storable"
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """One entry whose signature was checked.

    Attributes:
        fingerprint: its key.
        payload: what was put; empty if it is only a mark that the program cannot be stored.
        facts: plain values put beside it.
        not_storable: why the program cannot be stored, or None.
    """

    fingerprint: Fingerprint
    payload: bytes
    facts: Mapping[str, Any]
    not_storable: str | None = None


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One line of a listing.

    Attributes:
        digest: the entry's name.
        nbytes: its size on disk.
        status: ``ok``, ``unchecked``, or what is wrong with it.
        fingerprint: its key; None if it cannot be read.
        facts: plain values put beside the program.
    """

    digest: str
    nbytes: int
    status: str
    fingerprint: Fingerprint | None
    facts: Mapping[str, Any]


def put_in(fingerprint: Fingerprint, payload: bytes, facts: Mapping[str, Any], key: Key) -> bytes:
    """The bytes of an entry.

    Raises:
        TypeError, ValueError: if the facts are no plain JSON values.
    """
    header = {"fingerprint": fingerprint.fields, "notes": dict(fingerprint.notes), "facts": dict(facts)}
    return entry.encode(header, payload, key)


def take_out(data: bytes, digest: str, key: Key) -> StoredProgram:
    """Check the bytes of an entry and read them.

    Raises:
        EntryError: if they are not what this store wrote under this digest.
    """
    header, payload = entry.decode(data, key)
    fingerprint = _fingerprint(header)
    if fingerprint.digest != digest:
        raise EntryError(
            "renamed", f"an entry is named by the digest of its key, {fingerprint.digest}; got {digest}"
        )
    facts = header.get("facts", {})
    return StoredProgram(fingerprint, payload, facts, facts.get(NOT_STORABLE))


def peek_info(disk: Disk, stored: Stored) -> EntryInfo:
    """A listing's line from the first bytes of an entry, unchecked."""
    try:
        header = entry.peek(disk.head(stored.digest, _HEAD_BYTES))
        if header is None:
            header = entry.peek(disk.head(stored.digest, stored.nbytes)) or {}
        return EntryInfo(
            stored.digest, stored.nbytes, "unchecked", _fingerprint(header), header.get("facts", {})
        )
    except (EntryError, OSError) as error:
        return EntryInfo(stored.digest, stored.nbytes, str(error), None, {})


def _fingerprint(header: Mapping[str, Any]) -> Fingerprint:
    try:
        return Fingerprint(header["fingerprint"], header.get("notes", {}))
    except (KeyError, AttributeError, FingerprintError) as error:
        raise EntryError(
            "foreign", f"an entry's header holds a fingerprint of this servax: {error}"
        ) from None
