"""The secret that signs entries: one small file that only its owner can read.

It lives in the user's configuration directory, not in the store: who can only write to a shared store
cannot make this process run anything.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import StoreUnsafe

_FORM = re.compile(rb"[0-9a-f]{64}\n?")


@dataclass(frozen=True, slots=True)
class Key:
    """A signing key.

    Attributes:
        secret: 32 bytes.
        name: says which key it is and gives nothing of it away.
    """

    secret: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, secret: bytes) -> "Key":
        """The key of a secret."""
        return cls(secret, hashlib.sha256(b"servax key name\0" + secret).hexdigest()[:12])


def config_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where servax keeps its key and its marks: ``$XDG_CONFIG_HOME/servax`` or ``~/.config/servax``."""
    return user_folder(environ.get("XDG_CONFIG_HOME"), ".config")


def user_folder(base: str | None, default: str) -> Path:
    """servax's folder under a base, or under a folder of the user's home."""
    if base:
        return Path(base) / "servax"
    try:
        return Path.home() / default / "servax"
    except RuntimeError:
        # A user without a home, as containers make them: a path at which nothing can be made.
        return Path(os.devnull) / "servax"


def load_or_create(path: Path) -> Key:
    """Read a key file; make one of mode 0600 if there is none.

    Several processes may do this at once: all get the same key.

    Raises:
        StoreUnsafe: if others may read or change the file, or it is damaged.
        OSError: if it can be neither read nor made.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path)


def _publish(temporary: Path, path: Path) -> None:
    try:
        # A link appears whole or not at all, and never replaces the key of a faster process.
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:
        # No hard links here. Of two processes at once one loses its key; its entries are then rebuilt.
        os.replace(temporary, path)


def _read(path: Path) -> Key:
    descriptor = os.open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        check_private(path, os.fstat(file.fileno()))
        text = file.read(128)
    if _FORM.fullmatch(text) is None:
        raise StoreUnsafe(
            f"a key file holds 64 hexadecimal digits; {path} holds {len(text)} other bytes: delete it, a "
            f"new one is made at the next start"
        )
    return Key.of(bytes.fromhex(text.decode()))


def check_private(path: Path, status: os.stat_result) -> None:
    """Refuse a key file that others may read or write.

    Raises:
        StoreUnsafe: if its mode gives others any access or its owner is neither this user nor root.
    """
    if os.name != "posix":
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StoreUnsafe(f"a key file has mode 0600; {path} has {mode:04o}: chmod 600 it, or delete it")
    if status.st_uid not in (0, os.geteuid()):
        raise StoreUnsafe(f"a key file belongs to its user; {path} belongs to user {status.st_uid}: move it")
