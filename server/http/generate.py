"""`POST /v2/models/{name}/generate` and `generate_stream`, and the list of all routes for text."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.routing import Route

from ..config import HttpConfig
from ..errors import ServerError
from ..metrics import Metrics
from . import kserve, openai
from .chat import Chat
from .completions import Completions, prompt_ids
from .encode import dumps
from .sampling import Asked, Sampling, TextServer, decode, find, now
from .sse import Events, StreamRoute, event
from .wire import Call, Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/v2/models/{name}/generate"
GENERATE_STREAM = "/v2/models/{name}/generate_stream"


class Parameters(Sampling, forbid_unknown_fields=True, kw_only=True):
    """As for `/v1/completions`; the model's name is in the path."""

    model: str = ""
    max_tokens: int | None = 16


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the generate extension."""

    text_input: str
    id: str | None = None
    parameters: Parameters = msgspec.field(default_factory=Parameters)


_decoder = msgspec.json.Decoder(GenerateRequest)


class Generate:
    """Handler of both routes.

    Args:
        servers: models that generate text, by name.
        streams: whether the answer is events.
    """

    def __init__(self, servers: Mapping[str, TextServer], *, streams: bool) -> None:
        self._servers, self._streams = servers, streams

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        call.request_id = request.id
        server = find(self._servers, call.path["name"], call)
        call.param = None
        one = request.parameters
        params = one.params(call, max_tokens=one.max_tokens, logprobs=None)[:1]
        asked = Asked(server, prompt_ids(server, request.text_input), params, one, request.id or "", now())
        if self._streams:
            return self._events(asked)
        text = [delta.text async for _, delta in asked.deltas()]
        return Reply(dumps(_body(asked, "".join(text), None)))

    async def _events(self, asked: Asked) -> Events:
        deltas = asked.deltas()
        try:
            async for _, delta in deltas:
                if delta.text or delta.finish_reason:
                    yield event(dumps(_body(asked, delta.text, delta.finish_reason)))
        finally:
            await deltas.aclose()


def _body(asked: Asked, text: str, reason: str | None) -> dict[str, Any]:
    body = {"model_name": asked.server.name, "model_version": "1", "text_output": text}
    if asked.id:
        body["id"] = asked.id
    return body if reason is None else {**body, "finish_reason": reason}


def generation_routes(
    servers: Mapping[str, TextServer], *, metrics: Metrics, config: HttpConfig | None = None
) -> list[Route]:
    """Routes for text, to be added to an application.

    Args:
        servers: models that generate text, by name; read at each request, so it may be filled later.
        metrics: counts requests.
        config: limits of the front.
    """
    config = config or HttpConfig()
    options: dict[str, Any] = {
        "metrics": metrics,
        "max_body_bytes": config.max_body_bytes,
        "retry_after_s": config.retry_after_s,
    }

    def as_openai(call: Call, error: ServerError) -> bytes:
        return openai.error_body(call, error)

    def as_kserve(call: Call, error: ServerError) -> bytes:
        return kserve.error_body(call, error, None)

    routes = [
        (COMPLETIONS, StreamRoute("completions", Completions(servers), as_openai, **options)),
        (CHAT, StreamRoute("chat", Chat(servers), as_openai, **options)),
        (GENERATE, StreamRoute("generate", Generate(servers, streams=False), as_kserve, **options)),
        (GENERATE_STREAM, StreamRoute("generate", Generate(servers, streams=True), as_kserve, **options)),
    ]
    return [Route(path, route, methods=["POST"]) for path, route in routes]
