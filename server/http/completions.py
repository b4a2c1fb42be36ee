"""`POST /v1/completions`: continuations of texts or token ids, whole or as a stream of events."""

import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from ..errors import BadRequest
from ..generation.output import Delta, TokenLogprobs
from ..seam import Engine
from ..tokenizing import Tokenizing
from .answers import stream, whole, words
from .sampling import MAX_CHOICES, Asked, Sampling, TextServer, decode, find, now
from .sse import Events
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
        engine: holds the models.
        tokenizing: runs their tokenizers.
    """

    def __init__(self, engine: Engine, tokenizing: Tokenizing) -> None:
        self._engine, self._tokenizing = engine, tokenizing

    async def __call__(self, call: Call) -> Reply | Events:
        """Answers one call; raises `ServerError`."""
        request = decode(_decoder, call)
        server = find(self._engine, request.model, call)
        _supported(request, call)
        params = request.params(call, max_tokens=request.max_tokens, logprobs=request.logprobs)
        call.param = "prompt"
        prompts = await prompt_ids(server, request.prompt, self._tokenizing)
        if len(prompts) * len(params) > MAX_CHOICES:
            raise BadRequest(
                f"a request has at most {MAX_CHOICES} choices; got {len(prompts)} prompts of {len(params)}: "
                f"send several requests"
            )
        call.param = None
        asked = Asked(server, prompts, params, request, f"cmpl-{uuid.uuid4().hex}", now())
        return stream(asked, _Shape()) if request.stream else Reply(await whole(asked, _Shape()))


def _supported(request: CompletionRequest, call: Call) -> None:
    for name, given in (("echo", request.echo), ("suffix", request.suffix)):
        if given:
            call.param = name
            raise BadRequest(f"{name} is not offered; got {given!r}: leave it out")
    if request.best_of not in (None, request.n or 1):
        call.param = "best_of"
        raise BadRequest(f"best_of equals n here; got {request.best_of}: leave it out")


async def prompt_ids(
    server: TextServer, prompt: str | list[Any], tokenizing: Tokenizing
) -> Sequence[np.ndarray]:
    """The tokens of each prompt.

    Raises:
        BadRequest: forms are mixed, or a text cannot be tokenized.
    """
    alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    many: list[Any] = [prompt] if alone else list(prompt)
    kinds = set(map(type, many))
    if kinds == {list}:
        if not all(type(token) is int and -(2**31) <= token < 2**31 for ids in many for token in ids):
            raise BadRequest("a list of token ids holds integers only; got others: send separate requests")
        return [np.array(ids, np.int32) for ids in many]
    if kinds != {str}:
        names = sorted(kind.__name__ for kind in kinds)
        raise BadRequest(f"prompt is one text or a list of one kind; got {names}: send separate requests")
    return await tokenizing(server.model.tokenizer.encode, many)


class _Shape:
    """Texts; of a stream each part of the logprobs knows its place in the whole."""

    whole = chunk = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def choice(self, asked: Asked, index: int, whole: Delta) -> dict[str, Any]:
        """See `Shape`."""
        return {
            "index": index,
            "text": whole.text,
            "logprobs": self._logprobs(asked, index, whole.logprobs),
            "finish_reason": whole.finish_reason,
        }

    def part(self, asked: Asked, index: int, delta: Delta) -> dict[str, Any] | None:
        """See `Shape`."""
        if not delta.text and not delta.logprobs and not delta.finish_reason:
            return None
        return self.choice(asked, index, delta)

    def _logprobs(self, asked: Asked, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if asked.params[0].logprobs is None:
            return None
        shown = words(asked, [one.token for one in logprobs])
        *places, self._offsets[index] = accumulate(map(len, shown), initial=self._offsets.get(index, 0))
        tops = [
            dict(zip(words(asked, [token for token, _ in best]), [value for _, value in best], strict=True))
            for best in (one.top[::-1] for one in logprobs)
        ]
        values = [one.logprob for one in logprobs]
        return {"tokens": shown, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}
