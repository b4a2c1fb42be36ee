"""How much memory there is, of the device or of this machine or container, and how much a call takes."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_UNLIMITED = 1 << 60
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")

HOST_SLACK_BYTES = 40 << 20
"""Freed memory that glibc keeps: 20 to 75 MiB on three models of 200 to 250 MiB, whatever their size.

Its threshold for giving back rises to 64 MiB as large buffers come and go. With the threshold fixed
(``MALLOC_MMAP_THRESHOLD_=131072`` in the environment) it keeps less than 3 MiB, but every run then pays for
fresh pages: a third more processor time for MiniLM at 8x64, nearly twice as much at 16x256.
"""


def memory_budget(device: jax.Device | None = None, *, share: float = 0.9) -> int:
    """Bytes that a server may take: a share of what is free now.

    Args:
        device: whose memory; None means the default device.
        share: of the free memory; the rest is left to the allocator and to others.
    """
    where = device if device is not None else jax.local_devices()[0]
    stats = where.memory_stats() if where.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return int(share * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return int(share * host_free_bytes())


def host_free_bytes(root: Path = Path("/")) -> int:
    """Free bytes of host memory: of the machine, or of the container where that is less.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    groups = root / "sys/fs/cgroup"
    free = [_machine_free(root / "proc/meminfo"), _free_of(groups / "memory", _VERSION_1)]
    # Version 2: the own group and those around it, each of which may have a limit.
    own = groups / _own_group(root / "proc/self/cgroup")
    free += [_free_of(one, _VERSION_2) for one in (own, *own.parents) if one.is_relative_to(groups)]
    return min(free)


def _own_group(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _machine_free(meminfo: Path) -> int:
    if (available := _kib(meminfo, "MemAvailable")) is not None:
        return available
    # No /proc: half of what is built in, since what others hold is unknown.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_of(group: Path, names: tuple[str, str, str]) -> int:
    """Limit less use of one control group; file pages that can be dropped count as free."""
    limit, used = _number(group / names[0]), _number(group / names[1])
    if limit is None or limit >= _UNLIMITED:
        return _UNLIMITED
    return max(0, limit - max(0, (used or 0) - _statistic(group / "memory.stat", names[2])))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    """A number of a list of names and numbers, 0 without it."""
    return _listed(path, f"{name} ") or 0


def peak_bytes(call: Callable[[], Any], proc: Path = Path("/proc/self")) -> int | None:
    """By how much a call raised the resident memory of this process at its height.

    Resets the process's high-water mark (``VmHWM``); freed memory is given back first, so that the call
    cannot hide in it.

    Args:
        call: is run once; what it returns is waited for and dropped.
        proc: the process's folder.

    Returns:
        Bytes, or None where the system does not tell (the call has run all the same).
    """
    trim_heap()
    try:
        (proc / "clear_refs").write_text("5")
        before = _kib(proc / "status", "VmRSS")
    except OSError:
        before = None
    jax.block_until_ready(call())
    after = _kib(proc / "status", "VmHWM")
    return None if before is None or after is None else max(0, after - before)


def resident_bytes(proc: Path = Path("/proc/self")) -> int:
    """Resident memory of this process in bytes, freed memory given back first; 0 where nobody tells."""
    trim_heap()
    return _kib(proc / "status", "VmRSS") or 0


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _kib(path: Path, name: str) -> int | None:
    kib = _listed(path, f"{name}:")
    return None if kib is None else kib * 1024


def _listed(path: Path, begin: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(begin)), None)
