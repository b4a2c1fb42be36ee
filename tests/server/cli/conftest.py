"""`servax serve` as a process, over modules of a test's own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Process:
    """A running `servax serve`; the URL is read from its first line."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        command = [sys.executable, "-m", "servax.server.cli", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.lines: list[str] = [self.process.stderr.readline()]
        self.url = next(word.rstrip(",") for word in self.lines[0].split() if word.startswith("http"))
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(("ready", "error")):
                self._settled.set()
        self._settled.set()

    def settle(self) -> None:
        """Waits for the line that says how warm-up ended."""
        assert self._settled.wait(120)

    def settle_ready(self) -> None:
        """Waits for the line that says that everything is warm."""
        self.settle()
        assert any(line.startswith("ready") for line in self.lines), self.lines

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="session")
def environment_of() -> Callable[[Path], dict[str, str]]:
    """What a process is started with that finds the modules of a folder."""

    def make(folder: Path) -> dict[str, str]:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}

    return make


@pytest.fixture
def start_serve() -> Iterator[Callable[..., Process]]:
    """Starts `servax serve` in an environment, with further arguments; ended with the test."""
    started: list[Process] = []

    def start(environment: dict[str, str], *arguments: str) -> Process:
        started.append(Process(environment, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()
