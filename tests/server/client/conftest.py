"""The real HTTP application over fake models, one of which writes text, in process and on a socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from servax.server.errors import ModelError
from servax.server.fake import FakeEngine, FakeTokenizer, counting_embedder, doubler
from servax.server.generation.output import Delta, Usage, join
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.metrics import Metrics
from servax.server.text import Embedder


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    encode_rendered = encode


class Parrot:
    """Says its prompt again, a character at a time; of "fail..." only the first four.

    Attributes:
        left: set once a stream ended, in whatever way.
        hold: while set, a stream stops after its second delta.
    """

    name, version, ready, max_request_rows = "parrot", "1", True, 1
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    limits: Mapping[str, int] = {}
    options: Mapping[str, Any] = {}
    report = SimpleNamespace(warm=[])

    def __init__(self) -> None:
        template = SimpleNamespace(render=lambda messages: "".join(one["content"] for one in messages))
        self.model = SimpleNamespace(tokenizer=Bytes(), chat=template)
        self.left = threading.Event()
        self.hold = False
        self.timeouts: list[float | None] = []

    def load(self) -> dict[str, int]:
        return {"waiting": 0, "running": 0, "free_pages": 9}

    async def agenerate(self, prompt: Any, params: Any = None, **options: Any) -> Delta:
        return join([delta async for delta in self.stream(prompt, params, **options)])

    async def stream(self, prompt: Any, params: Any = None, **options: Any) -> AsyncIterator[Delta]:
        self.timeouts.append(options["timeout_s"])
        text = bytes(np.asarray(prompt, np.uint8)).decode()
        try:
            for at, letter in enumerate(text):
                if at == 4 and text.startswith("fail"):
                    raise ModelError("the parrot has no more to say; got a bad word: ask again")
                if self.hold and at == 2:
                    await asyncio.Event().wait()
                yield Delta((at,), letter)
            yield Delta((0,), "", (), "stop", None, Usage(len(prompt), len(text), 1))
        finally:
            self.left.set()


class Site:
    """Fake models behind the real HTTP application."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys
        self.toy = counting_embedder()
        self.double = doubler()
        self.bf16 = doubler("bf16", ml_dtypes.bfloat16, ("length",))
        self.parrot: Any = Parrot()
        self.engine = FakeEngine(self.toy, self.double, self.bf16, self.parrot)
        metrics = Metrics()
        texts = {"toy": Embedder(self.toy, FakeTokenizer(), inline_chars=200)}
        self.app = create_app(self.engine, texts=texts, metrics=metrics, api_keys=keys)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture(scope="module")
def live_site() -> Iterator[tuple[Site, str]]:
    """A site with a key, and its URL on a real socket."""
    site = Site("open sesame")
    with running(site.app) as url:
        yield site, url
