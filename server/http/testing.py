"""Run an ASGI application on a real socket, or a protocol on none, in the calling process; for tests."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .protocol import HttpProtocol


class _Announcing(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextlib.contextmanager
def running(app: ASGIApp, protocol: type[asyncio.Protocol] = HttpProtocol) -> Iterator[str]:
    """Serves `app` on a free port of 127.0.0.1 in a thread, as `servax serve` would.

    Args:
        app: an ASGI application.
        protocol: how uvicorn speaks HTTP.

    Yields:
        The base URL, such as `http://127.0.0.1:43210`.

    Raises:
        RuntimeError: the server did not listen within 30 seconds.
    """
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        access_log=False,
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=5,
    )
    server = _Announcing(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],), name="servax-http", daemon=True)
        thread.start()
        try:
            if not server.listening.wait(30.0):
                raise RuntimeError("The server must listen within 30 s, got silence; read its log.")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30.0)


class Wire(asyncio.Transport):
    """A connection without a socket, which notes what is written.

    Attributes:
        seen: all bytes so far.
        closed: whether it was closed.
        paused: whether it is not read from now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = b""
        self.closed = self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Addresses of the loopback interface."""
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        """Note bytes."""
        self.seen += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        """Note bytes."""
        self.seen += b"".join(list_of_data)

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def close(self) -> None:
        """Note the end."""
        self.closed = True

    def pause_reading(self) -> None:
        """Note that nothing is to be read."""
        self.paused = True

    def resume_reading(self) -> None:
        """Note that it is read again."""
        self.paused = False

    def answers(self) -> list[tuple[int, dict[str, str], Any]]:
        """Status, headers and JSON of each answer so far."""
        found, rest = [], self.seen
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            size = int(headers["content-length"])
            found.append((int(first.split()[1]), headers, json.loads(rest[:size])))
            rest = rest[size:]
        return found
