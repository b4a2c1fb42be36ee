"""What servers that were killed left in the temporary folder: the sockets for calls to themselves.

A server removes its own at its end; one that ended by SIGKILL, or for want of memory, could not.
"""

import contextlib
import itertools
import os
import socket
import stat
from pathlib import Path
from typing import Final

PREFIX: Final = "servax-lag-"
SOCKET: Final = "lag"
# So many names are looked at, and so many folders removed at one start.
_MOST_NAMES, _MOST_REMOVED = 10_000, 64


def folder_prefix() -> str:
    """The beginning of the name of a folder that this process makes; it says whose it is."""
    return f"{PREFIX}{os.getpid()}-"


def clear(temporary: str) -> int:
    """Remove what dead servers of our own user left in a folder.

    Only a folder of our own user goes, whose name tells the id of a process that is gone (or our own id,
    since a restarted container gives the same again), and on whose socket nobody listens: a server that
    shares the temporary folder from another container may have any id.

    Returns:
        How many were removed.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        for entry in itertools.islice(entries, _MOST_NAMES):
            if removed < _MOST_REMOVED and entry.name.startswith(PREFIX) and _stale(Path(entry.path)):
                removed += _remove(Path(entry.path))
    return removed


def _stale(folder: Path) -> bool:
    pid = folder.name.removeprefix(PREFIX).partition("-")[0]
    try:
        found = folder.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return ours and pid.isdecimal() and _gone(int(pid)) and not _listened(folder / SOCKET)
    except OSError:  # it left meanwhile, or cannot be judged
        return False


def _gone(pid: int) -> bool:
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _listened(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as mine:
        mine.setblocking(False)
        try:
            mine.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def _remove(folder: Path) -> bool:
    try:
        (folder / SOCKET).unlink()
        folder.rmdir()
    except OSError:
        return False
    return True
