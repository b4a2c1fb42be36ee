"""The thread that sleeps until the next deadline, so that time counts while the device is busy."""

import logging
import math
import threading
from collections.abc import Callable

from .clock import Clock
from .request import Request
from .sinks import deliver

_log = logging.getLogger(__name__)


class Timer:
    """Asks what is late, sleeps until more may be, and tells those whose time is up.

    Args:
        clock: source of time.
        lock: guards what is looked at; held whenever `expire` and `next_s` are called.
        expire: ends what is late at a time and returns it.
        next_s: when to ask again.

    Attributes:
        until_s: for how long it sleeps.
    """

    def __init__(
        self,
        clock: Clock,
        lock: threading.Lock,
        expire: Callable[[float], list[Request]],
        next_s: Callable[[float], float],
    ) -> None:
        self._clock, self._lock = clock, lock
        self._expire, self._next_s = expire, next_s
        self.cond = threading.Condition(lock)
        self.until_s = math.inf
        self._over = False

    def start(self, broken: Callable[[], None]) -> None:
        """Begin; `broken` is called should a bug end the thread."""
        threading.Thread(target=self._run, args=(broken,), name="servax-timer", daemon=True).start()

    def hurry(self, deadline_s: float) -> None:
        """Something new is due then, before `until_s`; the lock is held."""
        self.until_s = deadline_s
        self.cond.notify()

    def end(self) -> None:
        """Let the thread end; the lock is held."""
        self._over = True
        self.cond.notify_all()

    def _run(self, broken: Callable[[], None]) -> None:
        try:
            while not self._over:
                with self._lock:
                    now_s = self._clock.now()
                    late = self._expire(now_s)
                    if not late and not self._over:
                        next_s = self._next_s(now_s)
                        # Kept if it is yet to come, though its request may have ended: else quick answers
                        # would have every newcomer wake this thread.
                        if not now_s < self.until_s < next_s:
                            self.until_s = next_s
                        self._clock.wait(self.cond, self.until_s)
                deliver(late)
        except BaseException as error:  # a bug of ours: without time nobody would be told anything
            _log.critical("the timer thread ended", exc_info=error)
            broken()
