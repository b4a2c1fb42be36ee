"""A copy of the store elsewhere: any fsspec location, read after the local directory, written behind it.

Whatever the remote does, it may delay a start by a bounded time only. One daemon thread talks to it; who
asks waits for an answer until the budget of fruitless waiting is spent, then the remote is given up for
the life of the process. A thread that hangs does not keep the process from ending.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .report import Ledger

BUDGET_S = 5.0
_TOPIC = "remote"


class Remote:
    """Entries at an fsspec location.

    Args:
        url: such as ``s3://bucket/servax``.
        ledger: where the one warning goes.
        budget_s: most seconds of waiting that end without an entry, all calls together.
    """

    def __init__(self, url: str, ledger: Ledger, budget_s: float = BUDGET_S) -> None:
        self.url = url.rstrip("/")
        self._ledger = ledger
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._file_system: Any = None
        self._root = ""
        self._uploads: list[Future[None]] = []

    @property
    def given_up(self) -> bool:
        """Whether the remote is no longer asked."""
        return self._budget_s <= 0

    def fetch(self, name: str) -> bytes | None:
        """The bytes of an entry; None if it is not there or the remote does not answer in time."""
        if self.given_up:
            return None
        begin = time.monotonic()
        data: bytes | None = None
        try:
            data = self._submit(lambda: self._read(name)).result(self._budget_s)
        except FileNotFoundError:
            pass
        except TimeoutError:
            self._give_up(f"it did not answer within {self._budget_s:.1f} s")
        except Exception as error:  # each file system has its own
            self._give_up(f"{type(error).__name__}: {error}")
        if data is None:
            self._budget_s -= time.monotonic() - begin
        return data

    def send(self, name: str, data: bytes) -> None:
        """Write an entry there some time soon; a failure is a warning."""
        if not self.given_up:
            upload = self._submit(lambda: self._write(name, data))
            with self._lock:
                self._uploads = [one for one in self._uploads if not one.done()] + [upload]

    def flush(self, timeout_s: float) -> bool:
        """Wait for writes under way; False if some were not done in time."""
        if self.given_up:
            return False
        deadline = time.monotonic() + timeout_s
        with self._lock:
            uploads = list(self._uploads)
        for upload in uploads:
            try:
                upload.exception(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._ledger.warn(_TOPIC, f"the remote store {self.url} did not take all entries in time")
                return False
        return True

    def _submit(self, job: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="servax-remote", daemon=True)
                self._thread.start()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        # Ends with the process: a call that never returns must not be waited for.
        while True:
            future, job = self._jobs.get()
            if self.given_up:
                future.cancel()
                continue
            try:
                result = job()
            except BaseException as error:  # who waits for the future has it
                future.set_exception(error)
            else:
                future.set_result(result)

    def _read(self, name: str) -> bytes:
        data: bytes = self._connect().cat_file(f"{self._root}/{name}")
        return data

    def _write(self, name: str, data: bytes) -> None:
        try:
            self._connect().makedirs(self._root, exist_ok=True)
            self._file_system.pipe_file(f"{self._root}/{name}", data)
        except Exception as error:  # each file system has its own
            self._ledger.warn(_TOPIC, f"the remote store {self.url} took no entry: {error}")

    def _connect(self) -> Any:
        if self._file_system is None:
            import fsspec  # type: ignore[import-untyped,unused-ignore]

            self._file_system, self._root = fsspec.core.url_to_fs(self.url)
            self._root = self._root.rstrip("/")
        return self._file_system

    def _give_up(self, reason: str) -> None:
        self._budget_s = 0.0
        self._ledger.warn(
            _TOPIC, f"the remote store {self.url} is not asked any more: {reason}; serving goes on without it"
        )
