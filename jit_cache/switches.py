"""While something long holds the interpreter in the background, the threads that serve ask for it sooner."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0005
"""Seconds after which the interpreter changes threads beside requests; `servax serve` sets it for good."""

_HALF_S = 5e-7  # it is kept in whole microseconds, cut off: without this it would shrink each time
_lock = threading.Lock()
_inside = 0
_before_s = 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Have the interpreter change threads after `SWITCH_S` at most while the body runs, in the whole process.

    A request changes threads several times, and beside a thread that traces it waits for each change as long
    as the interpreter lets that one run on: by default 5 ms. A process that is the user's gets its own
    setting back: the last one that leaves, nested or from several threads, restores what was set before.
    """
    global _inside, _before_s
    with _lock:
        if not _inside:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, SWITCH_S))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_before_s + _HALF_S)
