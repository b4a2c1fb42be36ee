"""`POST /v1/chat/completions`: answers to messages, by the model's own chat template."""

import uuid
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from ..errors import BadRequest
from ..generation.output import TokenLogprobs, Usage
from .encode import dumps
from .sampling import Asked, Sampling, TextServer, decode, find, now
from .sse import Events, event
from .wire import Call, Reply


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Only plain text is offered."""

    type: Literal["text"] = "text"


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    `content` of a message is a text, or a list of parts of type text.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


class Chat:
    """Handler of `POST /v1/chat/completions`.

    Args:
        servers: models that generate text, by name; read at each request.
    """

    def __init__(self, servers: Mapping[str, TextServer]) -> None:
        self._servers = servers

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        server = find(self._servers, request.model, call)
        if request.top_logprobs is not None and not request.logprobs:
            call.param = "top_logprobs"
            raise BadRequest("top_logprobs needs logprobs true; got false: set both or none")
        most = request.max_completion_tokens or request.max_tokens
        params = request.params(
            call, max_tokens=most, logprobs=request.top_logprobs or 0 if request.logprobs else None
        )
        call.param = "messages"
        prompt = render(server, request.messages)
        call.param = None
        asked = Asked(server, [prompt], params, request, f"chatcmpl-{uuid.uuid4().hex}", now())
        return stream(asked) if request.stream else Reply(await whole(asked))


def render(server: TextServer, messages: list[dict[str, Any]]) -> np.ndarray:
    """The tokens of a conversation.

    Raises:
        BadRequest: the model has no chat template, or its template refuses the messages.
    """
    template = getattr(server.model, "chat", None)
    if template is None:
        raise BadRequest(
            f"chat needs a model with a chat template, got {server.name!r}, which has none; use "
            f"/v1/completions"
        )
    try:
        ids: np.ndarray = server.model.tokenizer.encode_rendered([template.render(messages)])[0]
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return ids


async def whole(asked: Asked) -> bytes:
    """The complete answer as JSON."""
    texts: dict[int, list[str]] = {}
    probabilities: dict[int, list[TokenLogprobs]] = {}
    reasons: dict[int, str] = {}
    usages: dict[int, Usage] = {}
    async for index, delta in asked.deltas():
        texts.setdefault(index, []).append(delta.text)
        probabilities.setdefault(index, []).extend(delta.logprobs)
        if delta.usage is not None and delta.finish_reason is not None:
            reasons[index], usages[index] = delta.finish_reason, delta.usage
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
            "logprobs": _logprobs(asked, probabilities[index]),
            "finish_reason": reasons[index],
        }
        for index in sorted(texts)
    ]
    return dumps({**_head(asked, "chat.completion"), "choices": choices, "usage": asked.usage(usages)})


async def stream(asked: Asked) -> Events:
    """The answer as events."""
    usages: dict[int, Usage] = {}
    options = asked.request.stream_options
    wants_usage = options is not None and options.include_usage
    head: dict[str, Any] = _head(asked, "chat.completion.chunk")
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    begun: set[int] = set()
    deltas = asked.deltas()
    try:
        async for index, delta in deltas:
            if delta.usage is not None:
                usages[index] = delta.usage
            content: dict[str, Any] = {} if index in begun else {"role": "assistant", "content": ""}
            if delta.text:
                content["content"] = delta.text
            if not content and not delta.finish_reason and not delta.logprobs:
                continue
            begun.add(index)
            choice = {
                "index": index,
                "delta": content,
                "logprobs": _logprobs(asked, delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            yield event(dumps({**head, "choices": [choice], **more}))
    finally:
        await deltas.aclose()
    if wants_usage:
        yield event(dumps({**head, "choices": [], "usage": asked.usage(usages)}))
    yield event(b"[DONE]")


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.server.name}


def _logprobs(
    asked: Asked, logprobs: "list[TokenLogprobs] | tuple[TokenLogprobs, ...]"
) -> dict[str, Any] | None:
    if asked.params[0].logprobs is None:
        return None

    def word(token: int, value: float) -> dict[str, Any]:
        text = asked.server.model.tokenizer.decode([token], skip_special=False)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **word(one.token, one.logprob),
                "top_logprobs": [word(token, value) for token, value in one.top],
            }
            for one in logprobs
        ]
    }
