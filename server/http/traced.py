"""Middleware that gives each HTTP request a span; added only where calls are traced."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..generation.output import Delta
from ..tracing import Recorded, Stage, Tracing
from .entry import OPEN_PATHS


class Traced:
    """Goes around everything else, so that all that a request costs is in its span.

    Probes, metrics and the live page have none.

    Args:
        app: the application.
        tracing: makes the spans.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes one request through."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        method = scope["method"]
        known = {"http.request.method": method, "url.path": scope["path"]}
        call = self._tracing.begin(method, headers, known)
        status, first_s, request_id = 0, None, ""

        async def watched(message: Message) -> None:
            nonlocal status, first_s, request_id
            if message["type"] == "http.response.start":
                status, first_s = message["status"], time.monotonic()
                request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = route_of(scope["path"], scope.get("path_params") or {})
            call.span.update_name(f"{method} {route}")
            found: dict[str, str | int] = {"http.route": route, "servax.request_id": request_id}
            if status:
                found["http.response.status_code"] = status
            error = f"status {status}" if status >= 500 else "" if status else "the client left"
            call.end(found, error, first_s)


def route_of(path: str, parameters: dict[str, str]) -> str:
    """A path with the names of its parameters for their values: few spans differ in name."""
    named = {value: name for name, value in parameters.items() if value}
    return "/".join(f"{{{named[part]}}}" if part in named else part for part in path.split("/"))


async def traced_text(
    trace: Recorded, model: str, prompt_tokens: int, deltas: AsyncIterator[Delta]
) -> AsyncIterator[Delta]:
    """The same deltas; once they end, for whatever reason, the trace has a stage of them."""
    begun_s, first_s = time.monotonic(), None
    seen = []
    try:
        async for delta in deltas:
            first_s = time.monotonic() if first_s is None else first_s
            seen.append(delta)
            yield delta
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()
        _note(trace, model, prompt_tokens, seen, begun_s, first_s)


async def traced_whole(trace: Recorded, model: str, prompt_tokens: int, answer: Awaitable[Delta]) -> Delta:
    """The same text; the trace has a stage of it."""
    begun_s = time.monotonic()
    seen = []
    try:
        seen.append(await answer)
        return seen[0]
    finally:
        _note(trace, model, prompt_tokens, seen, begun_s, None)


def _note(
    trace: Recorded, model: str, prompt_tokens: int, seen: list[Delta], begun_s: float, first_s: float | None
) -> None:
    said: dict[str, str | int | float] = {
        "servax.model": model,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(one.ids) for one in seen),
        "servax.cached_tokens": sum(one.usage.cached_tokens for one in seen if one.usage is not None),
    }
    if first_s is not None:
        said["servax.first_token_s"] = round(first_s - begun_s, 6)
    trace.stages.append(Stage("generate", begun_s, time.monotonic(), said))
