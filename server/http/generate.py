"""`POST /v2/models/{name}/generate` and `generate_stream`, and the list of all routes for text."""

from typing import Any

import msgspec
from starlette.routing import Route

from ..config import HttpConfig
from ..errors import NotReady, ServerError
from ..metrics import Metrics
from ..seam import Engine
from ..tokenizing import Tokenizing
from . import kserve, openai
from .chat import Chat
from .completions import Completions, prompt_ids
from .encode import dumps
from .sampling import Asked, Sampling, decode, find, now
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
        engine: holds the models.
        tokenizing: runs their tokenizers.
        streams: whether the answer is events.
    """

    def __init__(self, engine: Engine, tokenizing: Tokenizing, *, streams: bool) -> None:
        self._engine, self._tokenizing, self._streams = engine, tokenizing, streams

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        call.request_id = request.id
        server = find(self._engine, call.path["name"], call)
        one = request.parameters
        params = one.params(call, max_tokens=one.max_tokens, logprobs=None)[:1]
        prompts = await prompt_ids(server, request.text_input, self._tokenizing)
        asked = Asked(server, prompts, params, one, request.id or "", now())
        if self._streams:
            return self._events(asked)
        (done,) = await asked.complete()
        return Reply(dumps(_body(asked, done.text, None)))

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


def generation_routes(engine: Engine, *, metrics: Metrics, config: HttpConfig) -> list[Route]:
    """Routes for text.

    Args:
        engine: those of its models that generate text answer here.
        metrics: counts requests.
        config: limits of the front.
    """
    options: dict[str, Any] = {
        "metrics": metrics,
        "max_body_bytes": config.max_body_bytes,
        "retry_after_s": config.retry_after_s,
    }
    limits = config.tokenize_inline_chars, config.tokenize_pending_chars, config.tokenize_text_chars
    shared = engine, Tokenizing(*limits)

    def as_openai(call: Call, error: ServerError) -> bytes:
        return openai.error_body(call, error, engine.status() if isinstance(error, NotReady) else None)

    def as_kserve(call: Call, error: ServerError) -> bytes:
        return kserve.error_body(call, error, engine.status() if isinstance(error, NotReady) else None)

    routes = [
        (COMPLETIONS, StreamRoute("completions", Completions(*shared), as_openai, **options)),
        (CHAT, StreamRoute("chat", Chat(*shared), as_openai, **options)),
        (GENERATE, StreamRoute("generate", Generate(*shared, streams=False), as_kserve, **options)),
        (GENERATE_STREAM, StreamRoute("generate", Generate(*shared, streams=True), as_kserve, **options)),
    ]
    return [Route(path, route, methods=["POST"]) for path, route in routes]
