"""HTTP/1.1 for uvicorn that sends the head of an answer together with its body.

uvicorn writes the two apart, each with a system call and in a packet of its own. Of the processor time of a
request of one row a tenth was the second call.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class JoinedWrites:
    """A transport that keeps the head of an answer for what follows in the same turn of the event loop.

    Args:
        transport: what is written to in the end; all but writing and closing is its own.
        loop: the event loop that it belongs to.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        setattr(self, name, found)  # looked up once a connection
        return found

    def write(self, data: bytes) -> None:
        """Writes what was kept and this; the head of an answer is kept."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            # An answer whose body comes later must not keep its status back.
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Writes what was kept, then closes."""
        self._flush()
        self._transport.close()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's own protocol over such a transport; for `uvicorn.Config(http=HttpProtocol)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes over a connection."""
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport, self.loop)))
