"""Counts every trace and compile of the process, by the phase of the thread that caused it.

JAX reports both through `jax.monitoring`. Listeners cannot be taken back, so one is registered for the
life of the process, at the first use.
"""

import contextlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import jax

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"

_LOGGER = logging.getLogger(__name__)

REQUEST = "request"
"""Phase of threads on a request's way; nothing may be traced or compiled there once sealed."""
WARMUP = "warmup"
"""Phase of the compile thread until the grid is warm."""
BACKGROUND = "background"
"""Phase of the compile thread afterwards."""
OTHER = "other"
"""Any thread that never said what it is: set-up code, the user's own code."""


class CompileLog:
    """Traces and compiles since the process began to listen, by phase.

    Thread-safe; counts only rise.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._listeners: list[Callable[[str, float], None]] = []
        self.traces: Counter[str] = Counter()
        self.compiles: Counter[str] = Counter()
        self.compile_s: defaultdict[str, float] = defaultdict(float)
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        jax.monitoring.register_event_listener(self._on_hit)

    def _on_hit(self, event: str, **_: str | int) -> None:
        if event == _FROM_CACHE:
            self._local.hit = True

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        phase = self.phase
        if event == _TRACE:
            with self._lock:
                self.traces[phase] += 1
        elif event == _COMPILE:
            # It is told after the hit, if there was one.
            self._local.from_cache, self._local.hit = getattr(self._local, "hit", False), False
            with self._lock:
                self.compiles[phase] += 1
                self.compile_s[phase] += duration_secs
                listeners = tuple(self._listeners)
            for listener in listeners:
                try:
                    listener(phase, duration_secs)
                except Exception:  # it would break a compile that may be somebody else's
                    _LOGGER.exception("a listener of compiles failed")

    @property
    def phase(self) -> str:
        """Phase of the calling thread."""
        return getattr(self._local, "phase", OTHER)

    @property
    def from_cache(self) -> bool:
        """Whether JAX took what the calling thread compiled last from its own persistent cache."""
        return bool(getattr(self._local, "from_cache", False))

    def mark_thread(self, phase: str) -> None:
        """Say what the calling thread is from now on."""
        self._local.phase = phase

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Say what the calling thread is for the length of a block."""
        before = self.phase
        self._local.phase = phase
        try:
            yield
        finally:
            self._local.phase = before

    def subscribe(self, listener: Callable[[str, float], None]) -> Callable[[], None]:
        """Call ``listener(phase, seconds)`` at each compile, until the returned function is called.

        It runs in the compiling thread; if it raises, the error is logged and the compile goes on.
        """
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    def total(self) -> tuple[int, int]:
        """Traces and compiles over all phases."""
        with self._lock:
            return self.traces.total(), self.compiles.total()


_log: CompileLog | None = None
_log_lock = threading.Lock()


def compile_log() -> CompileLog:
    """The process's one log; the listener starts with the first call."""
    global _log
    with _log_lock:
        if _log is None:
            _log = CompileLog()
        return _log
