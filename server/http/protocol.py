"""HTTP/1.1 for uvicorn that refuses unread what comes too fast, and joins head and body of an answer.

uvicorn writes the two apart, each with a system call and in a packet of its own. Of the processor time of a
request of one row a tenth was the second call.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .gate import CAME, Gate
from .refusals import Refusals, refusals_of

# HTTP/2 without TLS, which Java's client offers with its first request. The parser takes what follows such a
# head for that protocol, and the body would be lost.
_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n|\Z)", re.IGNORECASE)


def without_offer(head: bytes) -> bytes:
    """The head of a request, which may be answered as if it offered no change of protocol (RFC 9110, 7.8)."""
    kept = []
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in (b"upgrade", b"http2-settings"):
            continue
        if name == b"connection":
            options = [one.strip() for one in value.split(b",")]
            rest = [one for one in options if one.lower() not in (b"upgrade", b"http2-settings")]
            if not rest:
                continue
            line = b"connection: " + b", ".join(rest)
        kept.append(line)
    return b"\r\n".join(kept)


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

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Writes what was kept and these, which are whole."""
        self._flush()
        self._transport.writelines(parts)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Writes what was kept, then closes."""
        self._flush()
        self._transport.close()


class _Begun:
    """The application, which tells the gate once it begins a request that was let in."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (came := scope.get(CAME)) is not None:
            self._gate.begun(came[1], time.monotonic() - came[0])
        await self._app(scope, receive, send)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's own protocol over such a transport; for `uvicorn.Config(http=HttpProtocol)`.

    Where the application has a gate, each POST passes it as soon as its head is read. Those that it refuses
    are answered here, for a tenth of what an application costs; their bodies are thrown away as they come.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._refusals: Refusals | None = refusals_of(config.app)
        self._refusing, self._between = False, True
        if self._refusals is not None:
            self.app = cast("Any", _Begun(cast("ASGIApp", self.app), self._refusals.gate))

    def data_received(self, data: bytes) -> None:
        """Parses; a head that offers another protocol beside HTTP/1.1 is read without the offer."""
        if self._between:
            end = data.find(b"\r\n\r\n")
            if end > 0 and _OFFER.search(data, 0, end):
                data = without_offer(data[:end]) + data[end:]
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._between = False
        super().on_message_begin()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes over a connection."""
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport, self.loop)))

    def on_headers_complete(self) -> None:
        """Lets a request in, or refuses it; one behind others on its connection waits for those alone."""
        before: RequestResponseCycle | None = self.cycle
        waits = before is not None and not before.response_complete
        asked = self.parser.get_method() == b"POST" and not self.parser.should_upgrade()
        if self._refusals is None or waits or not asked:
            super().on_headers_complete()
            return
        came_s = time.monotonic()
        ahead = self._refusals.gate.enter(came_s)
        if ahead is None:
            self._refuse(self._refusals)
            return
        cast("Scope", self.scope)[CAME] = (came_s, ahead)
        try:
            super().on_headers_complete()
        except BaseException:  # its target is none, say: the connection ends
            self._refusals.gate.gone()
            raise

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # uvicorn may answer by itself: more connections are open than it was told to keep.
        if app is not self.app and self._refusals is not None and CAME in cycle.scope:
            self._refusals.gate.gone()
        super()._start_asgi_task(cycle, app)

    def _refuse(self, refusals: Refusals) -> None:
        self._refusing = True
        if refusals.gate.refused():
            self.loop.call_soon(refusals.flush)
        if self.transport.is_closing():
            return
        if self.expect_100_continue:  # the body may never come
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        # Past the joining of heads and bodies: this is whole.
        self.transport.writelines(
            refusals.answer(self.url, self.headers, self.server_state.default_headers, keep=self._keeps())
        )

    def _keeps(self) -> bool:
        """Whether the connection outlives a request that is refused."""
        old = self.parser.get_http_version() == "1.0"  # such a client may read until the end
        return self.parser.should_keep_alive() and not (old or self.expect_100_continue)

    def on_body(self, body: bytes) -> None:
        """A part of a body; of one that is refused it is dropped."""
        if not self._refusing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._between = True
        if not self._refusing:
            super().on_message_complete()
            return
        self._refusing = False
        if not self._keeps():
            self.transport.close()
        self.on_response_complete()
        if self.flow.write_paused and not self.transport.is_closing():
            self.flow.pause_reading()  # refusals await nothing: who reads none of them sends no more

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self.flow.resume_reading()
