"""The one compile service: a single thread that may trace and compile while everything else is sealed.

One thread, because the text of a lowered module is not thread-safe and because more compile threads gain
nothing on few cores (design, section 6). XLA recurses deeply, hence the large stack.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .errors import CompileError
from .monitor import BACKGROUND, WARMUP, compile_log
from .seal import open_seal
from .switches import quick_switches

T = TypeVar("T")
_STACK_BYTES = 64 << 20
_stack_lock = threading.Lock()
# Lowering is not thread-safe, and several servers in a process have a service each.
_turn = threading.Lock()


class CompileService:
    """Runs jobs one after another in a thread of its own.

    Every job's outcome, failure included, is in its future; the thread outlives failing jobs.
    """

    def __init__(self, name: str = "servax-compile") -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._phase = WARMUP
        self._closed = False
        self._lock = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queue a job.

        Raises:
            CompileError: if the service is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise CompileError("the compile service takes no job after close(); make a new server")
            if self._thread is None:
                self._thread = _start(self._work, self._name)
            self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        # One job per turn; ends at the None that close() puts.
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with _turn, quick_switches(), compile_log().during(self._phase), open_seal():
                    result = job()
            except BaseException as error:  # the future carries it to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # While the next job is waited for, nothing of the last one may be kept alive.
            del entry, future, job

    def warmed(self) -> None:
        """From now on compiles count as background work."""
        self._phase = BACKGROUND

    def close(self, timeout_s: float = 60.0) -> None:
        """Take no more jobs, drop those not begun and wait for the one in hand; again: does nothing."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread is threading.current_thread():
            raise CompileError("close() waits for the compile thread, which called it: call it elsewhere")
        with contextlib.suppress(queue.Empty):
            while (entry := self._jobs.get_nowait()) is not None:
                entry[0].cancel()
        self._jobs.put(None)
        thread.join(timeout_s)


def _start(target: Callable[[], None], name: str) -> threading.Thread:
    # The stack size is a process-wide setting that holds for threads started after it.
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
