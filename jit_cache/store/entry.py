"""The bytes of one stored program: self-describing, checksummed and signed.

Layout, big-endian::

    magic 8 | version u32 | header bytes u32 | payload bytes u64 | header (JSON) | payload
    | SHA-256 of all before | HMAC-SHA256 of all before

The payload is a pickle, so reading it is running it: `decode` hands it out only after lengths, checksum
and signature have been checked. The format and the order of the checks are the store's whole trust.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import EntryError
from .keyfile import Key

MAGIC = b"\x89servax\n"
VERSION = 1
_PREFIX = struct.Struct(">8sIIQ")
_HASH_BYTES = 32
_TRAILER_BYTES = 2 * _HASH_BYTES
SMALLEST_BYTES = _PREFIX.size + _TRAILER_BYTES


class Entry(NamedTuple):
    """A decoded entry: its header, plain JSON values, and its payload."""

    header: dict[str, Any]
    payload: bytes


def canonical(value: Any) -> bytes:
    """JSON with one spelling for equal values: sorted keys, no spaces, no NaN.

    Raises:
        ValueError, TypeError: if it holds what JSON cannot.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def encode(header: Mapping[str, Any], payload: bytes, key: Key) -> bytes:
    """The bytes of an entry; ``key`` signs them."""
    head = canonical({**header, "key": key.name})
    body = b"".join((_PREFIX.pack(MAGIC, VERSION, len(head), len(payload)), head, payload))
    checksum = hashlib.sha256(body).digest()
    return b"".join((body, checksum, _sign(body, checksum, key)))


def decode(data: bytes, key: Key) -> Entry:
    """Check an entry and take it apart.

    Raises:
        EntryError: of kind ``empty``, ``foreign``, ``future``, ``torn``, ``corrupt`` or ``unsigned``.
    """
    head_bytes, payload_bytes = _lengths(data)
    expected = SMALLEST_BYTES + head_bytes + payload_bytes
    if len(data) != expected:
        raise EntryError("torn", f"an entry has the length it states, {expected} bytes; got {len(data)}")
    view = memoryview(data)
    body = view[:-_TRAILER_BYTES]
    checksum = bytes(view[-_TRAILER_BYTES:-_HASH_BYTES])
    if not hmac.compare_digest(hashlib.sha256(body).digest(), checksum):
        raise EntryError("corrupt", "an entry has the checksum it states; its bytes were changed")
    header = _header(bytes(body[_PREFIX.size : _PREFIX.size + head_bytes]))
    if not hmac.compare_digest(_sign(body, checksum, key), bytes(view[-_HASH_BYTES:])):
        raise EntryError(
            "unsigned",
            f"an entry is signed with this store's key, {key.name}; this one names {header.get('key')!r}: "
            f"give both sides one key file to share entries",
        )
    return Entry(header, bytes(body[_PREFIX.size + head_bytes :]))


def peek(data: bytes) -> dict[str, Any] | None:
    """The header of an entry, unchecked, from its first bytes; None if they are too few.

    Only for listings: nothing in it may be trusted.

    Raises:
        EntryError: if it is no entry of this format.
    """
    head_bytes, _ = _lengths(data)
    if len(data) < _PREFIX.size + head_bytes:
        return None
    return _header(data[_PREFIX.size : _PREFIX.size + head_bytes])


def _lengths(data: bytes) -> tuple[int, int]:
    if not data:
        raise EntryError("empty", "an entry is not empty; got 0 bytes")
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise EntryError("foreign", f"an entry begins with {MAGIC!r}; got {data[:8]!r}")
    if len(data) < _PREFIX.size:
        raise EntryError("torn", f"an entry has at least {SMALLEST_BYTES} bytes; got {len(data)}")
    _, version, head_bytes, payload_bytes = _PREFIX.unpack_from(data)
    if version != VERSION:
        kind = "future" if version > VERSION else "foreign"
        raise EntryError(kind, f"this servax reads entries of format {VERSION}; got format {version}")
    return head_bytes, payload_bytes


def _header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise EntryError("corrupt", "an entry's header is a JSON object; this one is not")
    return header


def _sign(body: bytes | memoryview, checksum: bytes, key: Key) -> bytes:
    signer = hmac.new(key.secret, body, hashlib.sha256)
    signer.update(checksum)
    return signer.digest()
