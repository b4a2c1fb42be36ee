"""Life of a language model's server: start, warm up, report, drain; `GenerationServer` adds the answers."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from ..errors import Closed, NotReady, Unavailable
from .desk import Desk
from .engine import Engine
from .programs import Key
from .worker import Worker

_JOIN_S = 10.0


class Host:
    """Starts and ends the threads of one engine.

    Args:
        engine: not yet warm.
        keys: its programs in the order of warm-up.
        desk: its desk.
        seal: forbid tracing in the whole process once warm.
        on_progress: called after each warm program with `(done, total, program, seconds)`.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Sequence[Key],
        desk: Desk,
        *,
        seal: bool,
        on_progress: Callable[[int, int, str, float], None] | None,
    ) -> None:
        self.engine, self._keys, self._desk = engine, keys, desk
        self._worker = Worker(engine, keys, seal=seal, on_progress=on_progress)
        self._life = threading.Lock()
        self._state = "new"

    def start(self) -> Self:
        """Begin to compile in the background; returns at once.

        Raises:
            Closed: it was started or closed before.
        """
        with self._life:
            if self._state != "new":
                raise Closed(f"a server is started once; this one is {self._state}: make a new one")
            self._state = "started"
            self._worker.start()
        return self

    def wait_ready(self, timeout_s: float = 900.0) -> Self:
        """Block until every program is warm.

        Raises:
            Unavailable: a program does not compile, or the device thread ended.
            NotReady: the timeout passes first.
        """
        if self._state != "started":
            raise Closed(f"a server gets ready once, after start(); this one is {self._state}")
        if not self._worker.ready.wait(timeout_s):
            raise NotReady(
                f"the server was to be ready within {timeout_s:g} s; {self._worker.done} of "
                f"{len(self._keys)} programs are warm: wait on"
            )
        if self._worker.failure is not None:
            raise Unavailable(
                f"warm-up ended with {self._worker.failure!r}: correct it and restart"
            ) from self._worker.failure
        return self

    def close(self, drain_s: float = 30.0) -> None:
        """Take no more requests, answer those there are for `drain_s`, fail the rest, end the threads."""
        with self._life:
            if self._state in ("draining", "closed"):
                return
            started, self._state = self._state == "started", "draining"
        self._desk.drain()
        if started:
            if self._worker.ready.is_set():
                self._desk.wait_idle(drain_s)
            self._worker.stop()
            self._desk.close()
            self._worker.join(_JOIN_S)
        self._state = "closed"

    async def aclose(self, drain_s: float = 30.0) -> None:
        """`close` without holding the event loop."""
        await asyncio.to_thread(self.close, drain_s)

    def __enter__(self) -> Self:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.close(drain_s=0.0)
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def live(self) -> bool:
        """Whether the process can still answer."""
        return self._state == "new" or (self._worker.alive and self._worker.failure is None)

    @property
    def ready(self) -> bool:
        """Whether every program is warm and requests are taken."""
        return self._state == "started" and self.live and self._worker.ready.is_set()

    @property
    def draining(self) -> bool:
        """Whether `close` was called."""
        return self._state in ("draining", "closed")

    def require_ready(self, name: str) -> None:
        """Refuse what comes before the last program is warm.

        Raises:
            NotReady: saying how many are.
        """
        if self._state == "new" or (self._state == "started" and not self._worker.ready.is_set()):
            raise NotReady(
                f"model {name!r} answers once it is warm; {self._worker.done} of {len(self._keys)} programs "
                f"are: retry shortly"
            )

    def status(self) -> dict[str, Any]:
        """State and warm-up progress."""
        failure = self._worker.failure
        warming = "ready" if self.ready else "warming" if failure is None else "failed"
        return {
            "state": warming if self._state == "started" else self._state,
            "done": self._worker.done,
            "total": len(self._keys),
            "failed": {},
            "error": None if failure is None else str(failure),
        }

    def load(self) -> dict[str, int]:
        """Sequences that wait and run, and pages that can be taken, after the last step."""
        load = self._desk.load
        return {"waiting": load.waiting, "running": load.running, "free_pages": load.free_pages}
