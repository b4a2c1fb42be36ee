"""`POST /v1/completions`: continuations of texts or token ids, whole or as a stream of events."""

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..errors import BadRequest
from ..generation.output import Delta, TokenLogprobs, Usage
from .encode import dumps
from .sampling import MAX_CHOICES, Asked, Sampling, TextServer, decode, find, now
from .sse import Events, event
from .wire import Call, Reply


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/completions`.

    `prompt` is a text, a list of texts, a list of token ids (marks included), or a list of such lists.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """Handler of `POST /v1/completions`.

    Args:
        servers: models that generate text, by name; read at each request.
    """

    def __init__(self, servers: Mapping[str, TextServer]) -> None:
        self._servers = servers

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        server = find(self._servers, request.model, call)
        _supported(request, call)
        params = request.params(call, max_tokens=request.max_tokens, logprobs=request.logprobs)
        call.param = "prompt"
        prompts = prompt_ids(server, request.prompt)
        if len(prompts) * len(params) > MAX_CHOICES:
            raise BadRequest(
                f"a request has at most {MAX_CHOICES} choices; got {len(prompts)} prompts of {len(params)}: "
                f"send several requests"
            )
        call.param = None
        asked = Asked(server, prompts, params, request, f"cmpl-{uuid.uuid4().hex}", now())
        return stream(asked) if request.stream else Reply(await whole(asked))


def _supported(request: CompletionRequest, call: Call) -> None:
    for name, given in (("echo", request.echo), ("suffix", request.suffix)):
        if given:
            call.param = name
            raise BadRequest(f"{name} is not offered; got {given!r}: leave it out")
    if request.best_of not in (None, request.n or 1):
        call.param = "best_of"
        raise BadRequest(f"best_of equals n here; got {request.best_of}: leave it out")


def prompt_ids(server: TextServer, prompt: str | list[Any]) -> list[np.ndarray]:
    """The tokens of each prompt.

    Raises:
        BadRequest: forms are mixed, or a text cannot be tokenized.
    """
    many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    kinds = set(map(type, many))
    if kinds == {list}:
        if not all(type(token) is int and -(2**31) <= token < 2**31 for ids in many for token in ids):
            raise BadRequest("a list of token ids holds integers only; got others: send separate requests")
        return [np.array(ids, np.int32) for ids in many]
    if kinds != {str}:
        names = sorted(kind.__name__ for kind in kinds)
        raise BadRequest(f"prompt is one text or a list of one kind; got {names}: send separate requests")
    try:
        return list(server.model.tokenizer.encode(many))
    except ValueError as error:
        raise BadRequest(str(error)) from error


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
        _choice(asked, index, "".join(texts[index]), probabilities[index], reasons[index], 0)
        for index in sorted(texts)
    ]
    return dumps({**_head(asked), "choices": choices, "usage": asked.usage(usages)})


async def stream(asked: Asked) -> Events:
    """The answer as events."""
    usages: dict[int, Usage] = {}
    offsets: dict[int, int] = {}
    options = asked.request.stream_options
    wants_usage = options is not None and options.include_usage
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    deltas = asked.deltas()
    try:
        async for index, delta in deltas:
            if delta.usage is not None:
                usages[index] = delta.usage
            if not _worth_sending(delta):
                continue
            offset = offsets.get(index, 0)
            offsets[index] = offset + len(delta.text)
            choice = _choice(asked, index, delta.text, delta.logprobs, delta.finish_reason, offset)
            yield event(dumps({**_head(asked), "choices": [choice], **more}))
    finally:
        await deltas.aclose()
    if wants_usage:
        yield event(dumps({**_head(asked), "choices": [], "usage": asked.usage(usages)}))
    yield event(b"[DONE]")


def _worth_sending(delta: Delta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def _head(asked: Asked) -> dict[str, Any]:
    return {
        "id": asked.id,
        "object": "text_completion",
        "created": asked.created,
        "model": asked.server.name,
    }


def _choice(
    asked: Asked,
    index: int,
    text: str,
    logprobs: "list[TokenLogprobs] | tuple[TokenLogprobs, ...]",
    reason: str | None,
    offset: int,
) -> dict[str, Any]:
    shown = _logprobs(asked, logprobs, offset) if asked.params[0].logprobs is not None else None
    return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


def _logprobs(asked: Asked, logprobs: Any, offset: int) -> dict[str, Any]:
    decode_ids = asked.server.model.tokenizer.decode
    words = [decode_ids([one.token], skip_special=False) for one in logprobs]
    places = [offset + sum(map(len, words[:at])) for at in range(len(words))]
    tops = [
        {decode_ids([token], skip_special=False): value for token, value in reversed(one.top)}
        for one in logprobs
    ]
    values = [one.logprob for one in logprobs]
    return {"tokens": words, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}
