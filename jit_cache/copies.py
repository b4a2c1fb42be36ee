"""Copies of executables for other devices of the same kind: loaded from what was compiled for one of them."""

import logging
import time
from collections.abc import Sequence
from typing import Any
from weakref import ref

import jax

from .store import serialize
from .store.load import Loaded

_log = logging.getLogger(__name__)

COPIED = "copied"


class Copies:
    """Makes them; compile thread only. The bytes of the last executable are kept until `clear`."""

    def __init__(self) -> None:
        self._last: tuple[ref[Any], bytes] | None = None
        self._warned: set[type[Exception]] = set()

    def of(self, executable: Any, facts: Any, devices: Sequence[jax.Device]) -> Loaded | None:
        """An executable for other devices; None where it has to be compiled for them, with one warning.

        Args:
            executable: one that was compiled in this process; what was loaded has no copies.
            facts: what is known of it.
            devices: where the copy runs, in the mesh's order.
        """
        begin_s = time.perf_counter()
        try:
            copy = serialize.load(self._bytes(executable), devices)
        except Exception as error:  # of the runtime too: a copy that fails is compiled
            level = logging.DEBUG if type(error) in self._warned else logging.WARNING
            self._warned.add(type(error))
            _log.log(level, "a program is compiled for each place, now for %s: %s", list(devices), error)
            return None
        return Loaded(copy, COPIED, "", facts, time.perf_counter() - begin_s)

    def _bytes(self, executable: Any) -> bytes:
        last = self._last  # `clear` may come in between
        if last is None or last[0]() is not executable:
            last = self._last = ref(executable), serialize.dump(executable)[0]
        return last[1]

    def clear(self) -> None:
        """Let go of the bytes; from any thread."""
        self._last = None
