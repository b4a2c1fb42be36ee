"""The device thread of a language model: compiles through the compile thread, warms up, runs the engine."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import jax
import numpy as np

from ...jit_cache import REQUEST, WARMUP, CompileService, compile_log, seal_process, unseal_process
from ..errors import ServerError, Unavailable
from .engine import Engine
from .programs import Key

_log = logging.getLogger(__name__)


class Worker:
    """Owns the engine's thread and its compile thread.

    Args:
        engine: what to run.
        keys: programs to warm, `zeros` first.
        seal: forbid tracing in the whole process once warm.
        on_progress: called after each warm program with `(done, total, program, seconds)`.

    Attributes:
        ready: set once warm, or once that failed.
        done: programs that are warm.
        failure: why the thread ended early, or None.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Sequence[Key],
        *,
        seal: bool,
        on_progress: Callable[[int, int, str, float], None] | None,
    ) -> None:
        self._engine, self._keys = engine, keys
        self._seal, self._sealed = seal, False
        self._on_progress = on_progress
        self._compiler = CompileService("servax-generation-compile")
        self._stop = threading.Event()
        self._futures: list[Future[float]] = []
        self._thread = threading.Thread(target=self._run, name="servax-generation", daemon=True)
        self.ready = threading.Event()
        self.done = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to compile, then to run."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Begin no further program of the warm-up; the one in hand is finished."""
        self._stop.set()
        for future in list(self._futures):
            future.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, once the desk is closed, and lift the seal."""
        self._thread.join(timeout_s)
        self._compiler.close()
        if self._sealed:
            self._sealed = False
            unseal_process()

    def _run(self) -> None:
        log = compile_log()
        log.mark_thread(WARMUP)
        try:
            if self._warm():
                log.mark_thread(REQUEST)
                self.ready.set()
            self._engine.run()
        except BaseException as error:  # health must show it, callers must not hang
            self.failure = error
            _log.critical("the generation thread ended", exc_info=error)
            self._engine.desk.close(functools.partial(_unavailable, error))
            with contextlib.suppress(Exception):
                self._engine.run()
        finally:
            self.ready.set()

    def _warm(self) -> bool:
        """Compile every program and run each once on padding; False if stopped in between."""
        programs = self._engine.programs
        self._futures += [
            self._compiler.submit(functools.partial(programs.compile, key)) for key in self._keys
        ]
        for key, future in zip(self._keys, self._futures, strict=True):
            try:
                seconds = future.result()
            except CancelledError:
                return False
            if self._stop.is_set():
                return False
            self._probe(key)
            self.done += 1
            if self._on_progress is not None:
                self._on_progress(self.done, len(self._keys), str(key), seconds)
        self._compiler.warmed()
        if self._seal:
            self._sealed = True
            seal_process()
        return True

    def _probe(self, key: Key) -> float:
        """Run a program once, so that no request is its first; seconds of that run."""
        engine, programs = self._engine, self._engine.programs
        begin_s = time.perf_counter()
        if key.kind == "zeros":
            programs.reset()
        elif key.kind == "copy":
            programs.copy([(0, 1)])
        elif key.kind == "fill":
            nothing = np.zeros(0, np.int32)
            programs.fill(engine.books.slots.sink, nothing, nothing)
        else:
            inputs = engine.books.table.inputs([], key.rows, engine.books.pool)
            if key.kind == "prefill":
                inputs["ids"] = np.zeros((key.rows, key.chunk), np.int32)
            programs.step(key, inputs)
        jax.block_until_ready(programs.state)
        return time.perf_counter() - begin_s


def _unavailable(cause: BaseException) -> ServerError:
    error = Unavailable(
        f"the generation thread ended with {type(cause).__name__}: {cause}: restart the server"
    )
    error.__cause__ = cause
    return error
