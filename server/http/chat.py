"""`POST /v1/chat/completions`: answers to messages, by the model's own chat template."""

import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..errors import BadRequest
from ..generation.output import Delta, TokenLogprobs
from ..seam import Engine
from ..tokenizing import Tokenizing
from .answers import stream, whole, words
from .sampling import Asked, Sampling, TextServer, decode, find, now
from .sse import Events
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
        engine: holds the models.
        tokenizing: runs their tokenizers.
    """

    def __init__(self, engine: Engine, tokenizing: Tokenizing) -> None:
        self._engine, self._tokenizing = engine, tokenizing

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        server = find(self._engine, request.model, call)
        if request.top_logprobs is not None and not request.logprobs:
            call.param = "top_logprobs"
            raise BadRequest("top_logprobs needs logprobs true; got false: set both or none")
        most = request.max_completion_tokens
        most = request.max_tokens if most is None else most
        params = request.params(
            call, max_tokens=most, logprobs=request.top_logprobs or 0 if request.logprobs else None
        )
        call.param = "messages"
        prompts = await render(server, request.messages, self._tokenizing)
        call.param = None
        asked = Asked(server, prompts, params, request, f"chatcmpl-{uuid.uuid4().hex}", now())
        return stream(asked, _Shape()) if request.stream else Reply(await whole(asked, _Shape()))


async def render(
    server: TextServer, messages: list[dict[str, Any]], tokenizing: Tokenizing
) -> Sequence[np.ndarray]:
    """The tokens of a conversation, one prompt.

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
        text = template.render(messages)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return await tokenizing(server.model.tokenizer.encode_rendered, [text])


class _Shape:
    """Messages; of a stream each choice begins with its role."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def choice(self, asked: Asked, index: int, whole: Delta) -> dict[str, Any]:
        """See `Shape`."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": _logprobs(asked, whole.logprobs),
            "finish_reason": whole.finish_reason,
        }

    def part(self, asked: Asked, index: int, delta: Delta) -> dict[str, Any] | None:
        """See `Shape`."""
        content: dict[str, Any] = {} if index in self._begun else {"role": "assistant", "content": ""}
        if delta.text:
            content["content"] = delta.text
        if not content and not delta.finish_reason and not delta.logprobs:
            return None
        self._begun.add(index)
        return {
            "index": index,
            "delta": content,
            "logprobs": _logprobs(asked, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }


def _logprobs(asked: Asked, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    if asked.params[0].logprobs is None:
        return None

    token_bytes = getattr(asked.server.model.tokenizer, "token_bytes", None)

    def word(token: int, value: float) -> dict[str, Any]:
        (text,) = words(asked, [token])
        # Those of the token itself, so that clients can join parts of a character.
        own = text.encode() if token_bytes is None else token_bytes(token)
        return {"token": text, "logprob": value, "bytes": list(own)}

    content = [
        {**word(one.token, one.logprob), "top_logprobs": [word(token, value) for token, value in one.top]}
        for one in logprobs
    ]
    return {"content": content}
