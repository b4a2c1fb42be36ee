"""A real `servax serve minilm` process on a free port, shared by the tests of this folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest


@dataclass
class Served:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    seen_before_ready: list[tuple[int, int]]  # (live, ready) status codes while it warmed up

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def await_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = 240
) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        assert process.poll() is None, log.read_text()
        try:
            live = httpx.get(f"{url}/v2/health/live").status_code
            ready = httpx.get(f"{url}/v2/health/ready").status_code
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        if ready == 200:
            return seen
        seen.append((live, ready))
        time.sleep(0.05)
    raise AssertionError(f"not ready within {limit_s} s: {log.read_text()}")


@contextlib.contextmanager
def running(log: Path, *arguments: str) -> Iterator[Served]:
    """`servax serve` with these arguments, ready; it must end with 0, by itself or when told to."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "servax.server.cli", "serve", *arguments, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"}
        )
    try:
        seen = await_ready(process, url, log)
        yield Served(url, process, log, seen)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running(tmp_path_factory.mktemp("serve") / "log", "minilm") as process:
        yield process


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Served]]:
    return lambda *arguments: running(tmp_path / "log", *arguments)
