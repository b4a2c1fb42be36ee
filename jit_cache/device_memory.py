"""How much memory there is, of the device or of this machine or container, and how much a call takes."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_UNLIMITED = 1 << 60

HOST_SLACK_BYTES = 48 << 20
"""Freed memory that glibc keeps: 20 to 60 MiB on four models of 100 to 400 MiB, whatever their size.

Its threshold for giving back rises to 64 MiB as large buffers come and go.
"""


def memory_budget(device: jax.Device | None = None, *, share: float = 0.9) -> int:
    """Bytes that a server may take: a share of what is free now.

    Args:
        device: whose memory; None means the default device.
        share: of the free memory; the rest is left to the allocator and to others.
    """
    where = device if device is not None else jax.devices()[0]
    stats = where.memory_stats() if where.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return int(share * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return int(share * host_free_bytes())


def host_free_bytes(root: Path = Path("/")) -> int:
    """Free bytes of host memory: of the machine, or of the container where that is less.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    free = _container_free(root / "sys/fs/cgroup")
    return min(free, _machine_free(root / "proc/meminfo"))


def _machine_free(meminfo: Path) -> int:
    if (available := _statistic_kib(meminfo, "MemAvailable")) is not None:
        return available
    # No /proc: half of what is built in, since what others hold is unknown.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_free(cgroup: Path) -> int:
    """Limit less use of the control group, version 2 or 1; file pages that can be dropped count as free."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most = _number(cgroup / limit)
        if most is not None and most < _UNLIMITED:
            droppable = _statistic(cgroup / Path(limit).parent / "memory.stat", cache)
            return max(0, most - max(0, (_number(cgroup / used) or 0) - droppable))
    return _UNLIMITED


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines if line.startswith(f"{name} ")]
    return int(found[0][1]) if found and found[0][1].isdecimal() else 0


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
        before = _statistic_kib(proc / "status", "VmRSS")
    except OSError:
        before = None
    jax.block_until_ready(call())
    after = _statistic_kib(proc / "status", "VmHWM")
    return None if before is None or after is None else max(0, after - before)


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _statistic_kib(path: Path, name: str) -> int | None:
    try:
        found = [line.split() for line in path.read_text().splitlines() if line.startswith(f"{name}:")]
    except OSError:
        return None
    return int(found[0][1]) * 1024 if found else None
