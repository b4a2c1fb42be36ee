"""What the routes for text answer with: choices, whole or as a stream of events, in the shape of a route."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..generation.output import Delta, Usage
from .encode import dumps
from .sampling import Asked
from .sse import Events, event


class Shape(Protocol):
    """How one route writes its choices; made for one call.

    Attributes:
        whole: `object` of a complete answer.
        chunk: `object` of an event.
    """

    whole: str
    chunk: str

    def choice(self, asked: Asked, index: int, whole: Delta) -> dict[str, Any]:
        """A complete choice."""
        ...

    def part(self, asked: Asked, index: int, delta: Delta) -> dict[str, Any] | None:
        """What came of a choice since its last part; None for nothing worth an event."""
        ...


async def whole(asked: Asked, shape: Shape) -> bytes:
    """The complete answer as JSON."""
    done = await asked.complete()
    choices = [shape.choice(asked, index, one) for index, one in enumerate(done)]
    usage = asked.usage([one.usage for one in done])
    return dumps({**_head(asked, shape.whole), "choices": choices, "usage": usage})


async def stream(asked: Asked, shape: Shape) -> Events:
    """The answer as events."""
    usages: list[Usage | None] = [None] * (len(asked.prompts) * len(asked.params))
    options = asked.request.stream_options
    wants_usage = options is not None and options.include_usage
    head = _head(asked, shape.chunk)
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    deltas = asked.deltas()
    try:
        async for index, delta in deltas:
            if delta.usage is not None:
                usages[index] = delta.usage
            if (choice := shape.part(asked, index, delta)) is not None:
                yield event(dumps({**head, "choices": [choice], **more}))
    finally:
        await deltas.aclose()
    if wants_usage:
        yield event(dumps({**head, "choices": [], "usage": asked.usage(usages)}))
    yield event(b"[DONE]")


def words(asked: Asked, tokens: Sequence[int]) -> list[str]:
    """The text of each token, marks included."""
    decode = asked.server.model.tokenizer.decode
    return [decode([token], skip_special=False) for token in tokens]


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.server.name}
