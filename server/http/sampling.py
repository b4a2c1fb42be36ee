"""What the routes for text ask with: fields of their bodies, and several choices at once."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from ..batching.request import DEFAULT_PRIORITY
from ..errors import BadRequest, UnknownModel
from ..generation.door import Prompt
from ..generation.output import Delta, Usage
from ..generation.params import SamplingParams
from ..seam import Engine, find_model
from ..tracing import recorded_trace
from .traced import traced_text, traced_whole
from .wire import Call

T = TypeVar("T")
MAX_CHOICES = 128
_field_in_message = re.compile(r"(?:field `|`\$\.)(\w+)")


@runtime_checkable
class TextServer(Protocol):
    """What the routes need of a `GenerationServer`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> Any: ...  # noqa: D102
    @property
    def options(self) -> Mapping[str, Any]: ...  # noqa: D102

    def load(self) -> dict[str, int]:
        """Texts that wait and run, and free pages."""
        ...

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        timeout_s: float | None = None,
        salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of a continuation; raises `ServerError`."""
        ...

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        timeout_s: float | None = None,
        salt: str | None = None,
    ) -> Delta:
        """The whole continuation; raises `ServerError`."""
        ...


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage` asks for one more chunk, with the tokens of the request."""

    include_usage: bool = False


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both bodies have; those from `top_k` on are extensions of servax."""

    model: str
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    user: str | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = DEFAULT_PRIORITY
    timeout_s: float | None = None

    def params(self, call: Call, *, max_tokens: int | None, logprobs: int | None) -> list[SamplingParams]:
        """One for each choice; those after the first have seeds of their own.

        Raises:
            BadRequest: a value is out of its range.
        """
        count = self.n if self.n is not None else 1
        if not 1 <= count <= MAX_CHOICES:
            call.param = "n"
            raise BadRequest(f"n is 1 to {MAX_CHOICES}; got {count}: send several requests")
        try:
            return [self._choice(choice, max_tokens, logprobs) for choice in range(count)]
        except BadRequest as error:  # its message begins with the field
            word = str(error).split(" ", 1)[0]
            call.param = word if word in {*self.__struct_fields__, "max_tokens", "logprobs"} else None
            raise

    def _choice(self, choice: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=_or(self.temperature, 1.0),
            top_k=self.top_k,
            top_p=_or(self.top_p, 1.0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed + choice,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special=self.skip_special_tokens,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def decode(decoder: "msgspec.json.Decoder[T]", call: Call) -> T:
    """Parses the body; raises `BadRequest` that names the field."""
    try:
        return decoder.decode(call.body)
    except msgspec.ValidationError as error:
        match = _field_in_message.search(str(error))
        call.param = match.group(1) if match else None
        raise BadRequest(
            f"The body must be what this route takes, got: {error}; see /openapi.json for its fields."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            f"The body must be JSON in UTF-8, got {len(call.body)} bytes: {error}; correct it."
        ) from None


def find(engine: Engine, name: str, call: Call, version: str | None = None) -> TextServer:
    """The server of a model that generates text and can answer now.

    Raises:
        UnknownModel: there is none of that name, or it generates no text.
        NotReady, Closed: see `find_model`.
    """
    call.param = "model"
    found = find_model(engine, name, version)
    if not isinstance(found, TextServer):
        texts = [other for other, model in engine.models.items() if isinstance(model, TextServer)]
        raise UnknownModel(
            f"The model must be one that generates text, got {name!r}; served: {', '.join(texts) or 'none'}."
        )
    call.model, call.param = name, None
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Continuations that one call asks for.

    Attributes:
        server: who generates.
        prompts: token ids of each prompt.
        params: one a choice of a prompt.
        request: the body's common fields.
        id: of the answer.
        created: Unix seconds.
    """

    server: TextServer
    prompts: Sequence[np.ndarray]
    params: Sequence[SamplingParams]
    request: Sampling
    id: str
    created: int

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all choices as they come, with the choice's index: by prompt, then by choice."""
        jobs = [(prompt, params) for prompt in self.prompts for params in self.params]
        if len(jobs) == 1:
            async for delta in self._one(*jobs[0]):
                yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._pump(index, *job, queue)) for index, job in enumerate(jobs)]
        left = len(jobs)
        try:
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def complete(self) -> list[Delta]:
        """The whole of each choice, in the order of `deltas`."""
        tasks = [
            asyncio.ensure_future(self._whole(prompt, params))
            for prompt in self.prompts
            for params in self.params
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, prompt: np.ndarray, params: SamplingParams) -> Delta:
        one = self.request
        answer = self.server.agenerate(
            prompt, params, priority=one.priority, timeout_s=one.timeout_s, salt=one.cache_salt
        )
        trace = recorded_trace()
        return await (answer if trace is None else traced_whole(trace, self.server.name, len(prompt), answer))

    def _one(self, prompt: np.ndarray, params: SamplingParams) -> AsyncIterator[Delta]:
        one = self.request
        deltas = self.server.stream(
            prompt, params, priority=one.priority, timeout_s=one.timeout_s, salt=one.cache_salt
        )
        trace = recorded_trace()
        return deltas if trace is None else traced_text(trace, self.server.name, len(prompt), deltas)

    async def _pump(
        self,
        index: int,
        prompt: np.ndarray,
        params: SamplingParams,
        queue: "asyncio.Queue[tuple[int, Delta | Exception]]",
    ) -> None:
        try:
            async for delta in self._one(prompt, params):
                queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait((index, error))

    def usage(self, usages: Sequence[Usage | None]) -> dict[str, Any]:
        """Tokens of the whole call, in OpenAI's shape: each prompt counts once.

        Args:
            usages: of each choice; None for one that has not ended.
        """
        prompt = sum(len(ids) for ids in self.prompts)
        text = sum(one.completion_tokens for one in usages if one is not None)
        cached = sum(one.cached_tokens for one in usages[:: len(self.params)] if one is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": text,
            "total_tokens": prompt + text,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def now() -> int:
    """Unix seconds."""
    return int(time.time())
