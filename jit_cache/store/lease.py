"""A lease: the right to compile one program, so that several processes compile each only once.

The operating system keeps it, as a lock on a file. It ends when its holder lets go or dies, however it
dies, so nothing here reads a clock to guess whether a holder lives. A holder that lives and hangs costs
those who wait their own time limit, no more: after it they compile for themselves.
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this platform: everybody compiles for themselves
    fcntl = None  # type: ignore[assignment]

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Lease:
    """Whether the lease is held, and if not, why.

    Attributes:
        held: nobody else works on this program.
        waited_s: seconds spent waiting; look into the store again if others may have been at work.
        reason: why it is not held; empty if it is.
    """

    held: bool
    waited_s: float = 0.0
    reason: str = ""


@contextlib.contextmanager
def lease(path: Path, timeout_s: float) -> Iterator[Lease]:
    """Hold the lease at a path for the length of a block.

    Args:
        path: the lock file; its directory exists. It is removed when the lease ends.
        timeout_s: most seconds to wait for another holder; 0 only tries.

    Yields:
        The lease, held or not; never raises because of the file system.
    """
    descriptor, state = _acquire(path, timeout_s)
    try:
        yield state
    finally:
        if descriptor is not None:
            # Removed while it is still locked: who opened it before finds another file (or none) at this
            # path afterwards and tries again.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path, timeout_s: float) -> tuple[int | None, Lease]:
    begin = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            descriptor = try_lock(path)
        except OSError as error:
            return None, Lease(False, time.monotonic() - begin, f"no lease here: {error}")
        waited_s = time.monotonic() - begin
        if descriptor is not None:
            return descriptor, Lease(True, waited_s)
        if waited_s >= timeout_s:
            return None, Lease(False, waited_s, f"another process held the lease for {waited_s:.1f} s")
        # Jitter keeps those who wait from trying in step.
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), timeout_s - waited_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def try_lock(path: Path) -> int | None:
    """Lock the file at a path, made if absent.

    Returns:
        A descriptor that holds the lock until it is closed, or None if somebody else has it.

    Raises:
        OSError: if the file cannot be opened or the file system has no locks.
    """
    if fcntl is None:
        raise OSError("this platform has no file locks")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have removed the file between our open and our lock.
        mine, named = os.fstat(descriptor), os.stat(path)
        if (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def lock_open_file(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if somebody else has it or there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, AttributeError):  # the latter where there are no such locks
        return False
    return True
