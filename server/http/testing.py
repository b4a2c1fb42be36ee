"""Run an ASGI application on a real socket inside the calling process; for tests, ours and yours."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

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
