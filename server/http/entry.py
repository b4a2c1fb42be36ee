"""What every HTTP request passes first: id, trace, API key, its client's name; and its line in the log."""

import hashlib
import hmac
import logging
import random
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..context import CALL, TRACE, CallContext, parse_traceparent
from ..errors import ServerError, Unauthorized
from .hot import HOT, HotPaths

# What an operator's tools read without a key: probes, metrics, the live page.
OPEN_PATHS = frozenset(
    {
        "/",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/health/warm",
        "/metrics",
        "/debug/grid.json",
        "/debug/page.css",
        "/debug/page.js",
        "/openapi.json",
    }
)
_access = logging.getLogger("servax.access")
_ids = random.Random()


class Keys:
    """The API keys that let a request in; none lets everybody in."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, given: bytes | None) -> str:
        """The client's name for a key, or "" where none is asked for.

        Args:
            given: an `Authorization` value (`Bearer KEY`) or the bare key; None if there was none.

        Raises:
            Unauthorized: if it is not one of the keys.
        """
        if not self._keys:
            return ""
        key = b"" if given is None else given.removeprefix(b"Bearer ").removeprefix(b"bearer ").strip()
        # Each is compared, in constant time: how long it takes tells nothing about any key.
        matches = [hmac.compare_digest(key, one) for one in self._keys]
        if not any(matches):
            got = "none" if given is None else "another one"
            raise Unauthorized(
                f"A request brings one of the server's API keys, got {got}; send `Authorization: Bearer KEY`."
            )
        return f"key:{hashlib.sha256(key).hexdigest()[:12]}"


class Entry:
    """Middleware around the application.

    It echoes `x-request-id`, or makes one, on every answer, and keeps it, the trace and the client's name in
    a context variable while the request lasts.

    Args:
        app: the application.
        keys: who may come in.
        refuse: an application that answers with the error in `scope["servax.error"]`.
        client_header: header that names a client, in lower case; None takes the peer's address.
        hot: finds the application of a hot route, which then skips the framework's own layers.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        refuse: ASGIApp,
        client_header: str | None = None,
        hot: HotPaths | None = None,
    ) -> None:
        self._app, self._keys, self._refuse, self._hot = app, keys, refuse, hot
        self._client_header = None if client_header is None else client_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        usable = 0 < len(given) <= 128 and all(0x21 <= byte <= 0x7E for byte in given)
        # An id is told apart, not kept secret: a tenth of the time of uuid4.
        chosen = given if usable else b"%032x" % _ids.getrandbits(128)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", chosen)]
            await send(message)

        app = scope.pop(HOT, None) or (self._hot and self._hot.find(scope)) or self._app
        client = ""
        try:
            if scope["path"] not in OPEN_PATHS:
                client = self._keys.check(headers.get(b"authorization", headers.get(b"x-api-key")))
        except ServerError as error:
            app, scope["servax.error"] = self._refuse, error
        trace = TRACE.get()
        if trace is None and (traced := headers.get(b"traceparent")) is not None:
            trace = parse_traceparent(traced.decode("latin-1"))
        context = CallContext(chosen.decode(), client or self._client(scope, headers), trace)
        token = CALL.set(context)
        try:
            await app(scope, receive, send_with_id)
        finally:
            if _access.isEnabledFor(logging.INFO):
                _log_line(scope, status, time.perf_counter() - start_s, context.client)
            CALL.reset(token)

    def _client(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        if self._client_header is not None and (named := headers.get(self._client_header)):
            return named[:200].decode("latin-1")
        peer = scope.get("client")
        return str(peer[0]) if peer else ""


def _log_line(scope: Scope, status: int, seconds: float, client: str) -> None:
    _access.info(
        "%s %s" if status else "%s %s, client gone",
        scope["method"],
        scope["path"],
        extra={"status": status, "seconds": round(seconds, 6), "client": client},
    )
