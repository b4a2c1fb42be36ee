"""A server of somebody's as a process of ours: started on loopback, waited for, paused, ended by its id."""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import ExperimentError

_POLL_S, _STOP_S = 0.2, 20.0
_TAIL = 2500


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class Process:
    """A command with a process group of its own.

    Args:
        command: what to run.
        env: variables beside those of this process.
        log: file that takes what it prints.
        pipes: whether its stdin and stdout are for talking to it; else both go to the log.
    """

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path, *, pipes: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.begin_s = time.perf_counter()
        talk = subprocess.PIPE if pipes else None
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=talk or subprocess.DEVNULL,
                stdout=talk or out,
                stderr=out if pipes else subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace").strip()[-_TAIL:]

    def check(self) -> None:
        """Raise `ExperimentError` if it ended."""
        if self.popen.poll() is not None:
            raise ExperimentError(
                f"{self.popen.args!r} must stay up; it ended with {self.popen.returncode}: {self.tail()}"
            )

    def wait_http(self, port: int, request: bytes, limit_s: float) -> float:
        """Ask until the answer is 200; seconds since the start.

        Raises:
            ExperimentError: if it ends first, or the time passes.
        """
        seen = "no connection"
        while time.perf_counter() - self.begin_s < limit_s:
            self.check()
            try:
                status, seen = ask_once(port, request, 10.0)
                if status == 200:
                    return time.perf_counter() - self.begin_s
            except (OSError, http.client.HTTPException) as error:
                seen = repr(error)
            time.sleep(_POLL_S)
        raise ExperimentError(
            f"{self.popen.args!r} must answer within {limit_s:g} s; at last it gave: {seen}; it printed: "
            f"{self.tail()}"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped, with all its children, so that it takes no time from whoever is measured."""
        self.check()
        os.killpg(self.popen.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.popen.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and its children: asked first, made to after a while."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, signal_)
            except ProcessLookupError:
                break
            try:
                self.popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue
        self.popen.wait(_STOP_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def ask_once(port: int, request: bytes, timeout_s: float) -> tuple[int, str]:
    """Status and text of one request on a connection of its own."""
    head, _, body = request.partition(b"\r\n\r\n")
    method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


@contextmanager
def running(process: Process) -> Iterator[Process]:
    """Stops it at the end, whatever happens."""
    try:
        yield process
    finally:
        process.stop()
