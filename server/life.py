"""The life of a server, embedding or generating: new, started, draining, closed, in this order and once."""

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import Any, Self

from .errors import Closed


class Life(ABC):
    """Start, readiness and end; a context manager that starts, waits until ready, drains and closes.

    A subclass says what starts (`_begin`), how it ends (`_end`), how an end is hurried (`_hurry`) and which
    threads may not close it (`_inside`).
    """

    def __init__(self) -> None:
        self._life = threading.Lock()
        self._over = threading.Event()
        self._state = "new"

    @abstractmethod
    def _begin(self) -> None:
        """Start every thread; `_state` becomes "started" when it returns."""

    @abstractmethod
    def _end(self, drain_s: float, *, started: bool) -> None:
        """Refuse newcomers, answer those admitted for `drain_s`, fail the rest, end the threads."""

    @property
    def _inside(self) -> bool:
        """Whether the caller is in a thread that `close` waits for."""
        return False

    @abstractmethod
    def _hurry(self) -> None:
        """Fail what is still to be answered: a second caller of `close` waits no longer for it."""

    @abstractmethod
    def wait_ready(self, timeout_s: float = 900.0) -> Self:
        """Block until everything is ready."""

    @property
    @abstractmethod
    def live(self) -> bool:
        """Whether the process can still answer; False only when it must be restarted."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """State, warm-up progress and failures."""

    def start(self) -> Self:
        """Begin to warm up in the background; returns at once.

        Raises:
            Closed: if it was started or closed before.
        """
        with self._life:
            if self._state != "new":
                raise Closed(f"a server is started once; this one is {self._state}: make a new one")
            self._begin()
            self._state = "started"
        return self

    def close(self, drain_s: float = 30.0) -> None:
        """Take no more requests, answer those admitted until the deadline, fail the rest, end the threads.

        Calling it again waits until the first call is through, but no longer for answers than its own
        `drain_s`.

        Raises:
            RuntimeError: if called in the device thread, such as from a callback of a future.
        """
        if self._inside:
            raise RuntimeError("the device thread cannot close its own server; call close from another one")
        with self._life:
            before = self._state
            if before in ("new", "started"):
                self._state = "draining"
        if before not in ("new", "started"):
            if not self._over.wait(drain_s):
                self._hurry()
                self._over.wait()
            return
        try:
            self._end(drain_s, started=before == "started")
        finally:
            self._state = "closed"
            self._over.set()

    async def aclose(self, drain_s: float = 30.0) -> None:
        """`close` without holding the event loop."""
        await asyncio.to_thread(self.close, drain_s)

    def __enter__(self) -> Self:
        if self._state == "started":  # by its owner, who hands it over
            return self.wait_ready()
        try:
            return self.start().wait_ready()
        except BaseException:
            self.close(drain_s=0.0)
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""
        return self._state in ("draining", "closed")
