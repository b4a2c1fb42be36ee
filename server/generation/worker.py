"""The device thread of a language model: compiles through the compile thread, warms up, runs the engine."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import jax
import numpy as np

from ...jit_cache import (
    REQUEST,
    WARMUP,
    CompileService,
    JitCacheError,
    WarmBucket,
    WarmupReport,
    WarmupStep,
    compile_log,
)
from ..errors import ServerError, Unavailable
from ..settling import settle, unsettle
from .engine import Engine
from .programs import Key
from .rows import all_tokens

OnProgress = Callable[[str, WarmupStep], None]
_log = logging.getLogger(__name__)
_RUNS = 3  # of a program whose seconds are weighed


class Worker:
    """Owns the engine's thread and its compile thread.

    Args:
        name: of the model.
        prepare: run in the compile thread before anything else; gives the engine to run and its programs,
            `zeros` first.
        seal: forbid tracing in the whole process once warm.
        on_progress: called with the model's name and each step, in the engine's thread.

    Attributes:
        ready: set once warm, or once it never will be.
        warm: whether every program is.
        report: of the warm-up.
        failure: why the thread ended early, or None.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        prepare: Callable[[], tuple[Engine, Sequence[Key]]],
        *,
        seal: bool,
        on_progress: OnProgress | None,
    ) -> None:
        self._name, self._engine, self._prepare = name, engine, prepare
        self._seal, self._sealed = seal, False
        self._on_progress = on_progress
        self._compiler = CompileService("servax-generation-compile")
        self._stop = threading.Event()
        self._futures: list[Future[Any]] = []
        self._thread = threading.Thread(target=self._run, name="servax-generation", daemon=True)
        self.ready = threading.Event()
        self.warm = False
        self.report = WarmupReport(0)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to compile, then to run."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Begin no further program of the warm-up; the one in hand is finished, and nobody waits for it."""
        self._stop.set()
        self.ready.set()
        for future in list(self._futures):
            future.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, once the desk is closed, and lift the seal."""
        self._thread.join(timeout_s)
        self._compiler.close(timeout_s)
        if self._sealed:
            self._sealed = False
            unsettle()

    def _run(self) -> None:
        log = compile_log()
        log.mark_thread(WARMUP)
        try:
            self.warm = self._warm()
            if self.warm:
                log.mark_thread(REQUEST)
                self.ready.set()
            self._engine.run()
        except BaseException as error:  # health must show it, callers must not hang
            self.failure = error
            self.stop()
            if self.warm:
                _log.critical("the generation thread ended", exc_info=error)
            else:
                _log.debug("warm-up ended", exc_info=error)
            self._engine.desk.close(functools.partial(_unavailable, error))
            with contextlib.suppress(Exception):
                self._engine.run()
        finally:
            self.ready.set()

    def _warm(self) -> bool:
        """Compile every program and run each once, full; False if stopped in between."""
        begin_s, report = time.monotonic(), self.report
        try:
            self._futures.append(self._compiler.submit(self._prepare))
            self._engine, keys = self._futures[0].result()
            report.total = len(keys)
            self._futures += [
                self._compiler.submit(functools.partial(self._engine.programs.compile, key)) for key in keys
            ]
            for key, future in zip(keys, self._futures[1:], strict=True):
                error = self._one(key, future)
                report.elapsed_s = time.monotonic() - begin_s
                if self._stop.is_set():
                    return False
                self._tell(key, error)
                if error is not None:
                    raise error
        except CancelledError:
            return False
        self._pace(keys)
        self._sealed = settle(self._compiler, seal=self._seal)
        return True

    def _one(self, key: Key, future: "Future[Any]") -> Exception | None:
        """Wait for a program and run it once; what went wrong, if anything did."""
        try:
            future.result()
            if not self._stop.is_set():
                run_s = self._probe(key)
                self.report.warm.append(WarmBucket(key, self._engine.programs.facts[key], run_s))
        except CancelledError:
            raise
        except Exception as error:
            self.report.failed[key] = named(error)
            return error
        return None

    def _pace(self, keys: Sequence[Key]) -> None:
        """Where guesses are weighed, time the steps between which it is chosen, now that nothing compiles."""
        drafting = self._engine.books.drafting
        if drafting is not None:
            for key in keys:
                if drafting.weighs(key) and not self._stop.is_set():
                    drafting.pace.note(key, min([self._probe(key) for _ in range(_RUNS)]))

    def _tell(self, key: Key, error: Exception | None) -> None:
        if self._on_progress is None:
            return
        report = self.report
        done = len(report.warm) + len(report.failed)
        facts = None if error is not None else report.warm[-1].facts
        named = None if error is None else report.failed[key]
        step = WarmupStep(key, done, report.total, report.elapsed_s, named, facts, len(report.failed))
        self._on_progress(self._name, step)

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
            programs.step(key, all_tokens(key, inputs))
        jax.block_until_ready(programs.state)
        return time.perf_counter() - begin_s


def named(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, JitCacheError):
        return str(error)
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def _unavailable(cause: BaseException) -> ServerError:
    error = Unavailable(
        f"the generation thread ended with {type(cause).__name__}: {cause}: restart the server", lasting=True
    )
    error.__cause__ = cause
    return error
