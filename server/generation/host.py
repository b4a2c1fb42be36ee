"""Life of a language model's server: start, warm up, report, drain; `GenerationServer` adds the answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ...jit_cache import WarmupReport
from ..errors import Closed, NotReady, Unavailable
from ..life import Life
from .desk import Desk
from .engine import Engine
from .programs import Key
from .worker import OnProgress, Worker, named

_JOIN_S = 5.0


class Host(Life):
    """Starts and ends the threads of one engine.

    Args:
        name: of the model.
        engine: not yet warm.
        keys: its programs in the order of warm-up.
        desk: its desk.
        prepare: run in the compile thread before anything else; gives the engine and the programs to warm,
            which are others than those above if its pool does not fit.
        seal: forbid tracing in the whole process once warm.
        on_progress: called with the model's name and each step of the warm-up.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        keys: Sequence[Key],
        desk: Desk,
        prepare: Callable[[], tuple[Engine, Sequence[Key]]],
        *,
        seal: bool,
        on_progress: OnProgress | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.engine, self._desk = engine, desk
        self._worker = Worker(name, engine, prepare, seal=seal, on_progress=on_progress)
        self._worker.report.total = len(keys)

    def _begin(self) -> None:
        self._desk.start()
        self._worker.start()

    def _end(self, drain_s: float, *, started: bool) -> None:
        self._desk.drain()
        try:
            if started and self._worker.warm:
                self._desk.wait_idle(drain_s)
        finally:
            self._worker.stop()
            self._desk.close()
            if started:
                self._worker.join(_JOIN_S)

    def _hurry(self) -> None:
        self._desk.close()

    @property
    def _inside(self) -> bool:
        return self._worker.current

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
                f"the server was to be ready within {timeout_s:g} s; {self._progress}: wait on, or warm up "
                f"ahead of time"
            )
        failure = self._worker.failure
        if failure is not None:
            failed = "; ".join(f"{program}: {error}" for program, error in self.report.failed.items())
            raise Unavailable(
                f"every program must be warm; {self._progress}: {failed or named(failure)}"
            ) from failure
        if not self.warm:
            raise Closed(f"a server gets ready before it is closed; {self._progress}: make a new one")
        return self

    def wait_over(self, timeout_s: float) -> bool:
        """Block until the warm-up has come to its end, however it went; whether it has."""
        return self._worker.ready.wait(timeout_s)

    @property
    def lost(self) -> bool:
        """Whether the warm-up failed: it ended there, so that the model never gets ready."""
        return self._worker.failure is not None and not self.warm

    @property
    def report(self) -> WarmupReport:
        """Of the warm-up, which fills it as it goes."""
        return self._worker.report

    @property
    def reports(self) -> Mapping[str, WarmupReport]:
        """The same by model name."""
        return {self.name: self.report}

    @property
    def _progress(self) -> str:
        return f"{len(self.report.warm)} of {self.report.total} programs are"

    @property
    def live(self) -> bool:
        """Whether the process can still answer; False once the device thread ended or hangs.

        A failed warm-up keeps it from getting ready, and a new process would fail as well.
        """
        if self._state == "new" or (self._worker.failure is not None and not self.warm):
            return True
        return self._worker.alive and self._worker.failure is None and not self._desk.stalled

    @property
    def ready(self) -> bool:
        """Whether every program is warm and requests are taken."""
        return self._state == "started" and self.live and self.warm

    @property
    def warm(self) -> bool:
        """Whether every program is."""
        return self._worker.warm

    def require_ready(self) -> None:
        """Refuse what comes before the last program is warm.

        Raises:
            NotReady: saying how many are.
        """
        if self._state == "new" or (self._state == "started" and not self._worker.ready.is_set()):
            raise NotReady(f"model {self.name!r} answers once it is warm; {self._progress}: retry shortly")

    def status(self) -> dict[str, Any]:
        """State, warm-up progress and failures, for people and for the body of a 503."""
        failure = self._worker.failure
        return {
            "state": self._state_word(),
            "done": len(self.report.warm),
            "total": self.report.total,
            "warm": self.warm,
            "failed": {f"{self.name} {program}": why for program, why in self.report.failed.items()},
            "error": None if failure is None else str(failure) or type(failure).__name__,
        }

    def _state_word(self) -> str:
        if self._state != "started" or self.ready:
            return "ready" if self.ready else self._state
        if self._desk.stalled:
            return "stalled"
        return "warming" if self._worker.failure is None else "failed"

    def load(self) -> dict[str, int]:
        """Sequences that wait and run, and pages that can be taken, after the last step."""
        load = self._desk.load
        return {"waiting": load.waiting, "running": load.running, "free_pages": load.free_pages}
