"""A site of fake models, reached in process or over a real socket."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from servax.server.config import HttpConfig
from servax.server.fake import FakeEngine, FakeTokenizer, counting_embedder, doubler
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.metrics import Metrics
from servax.server.text import Embedder


class Site:
    """Fake models behind the real HTTP application."""

    def __init__(self) -> None:
        self.toy = counting_embedder()
        self.double = doubler()
        self.ragged = doubler("ragged", shape=("length",))
        self.bf16 = doubler("bf16", ml_dtypes.bfloat16, ("length",))
        self.half = doubler("half", np.float16, (2,))
        self.engine = FakeEngine(self.toy, self.double, self.ragged, self.bf16, self.half)
        self.metrics = Metrics()
        self.app = create_app(
            self.engine,
            texts={"toy": Embedder(self.toy, FakeTokenizer(), inline_chars=200)},
            metrics=self.metrics,
            config=HttpConfig(max_body_bytes=200_000),
        )

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, in process."""

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def embed(self, **body: Any) -> httpx.Response:
        return self.call("POST", "/v1/embeddings", json={"model": "toy", **body})

    def infer(self, model: str, *inputs: dict[str, Any], **body: Any) -> httpx.Response:
        return self.call("POST", f"/v2/models/{model}/infer", json={"inputs": list(inputs), **body})

    def binary(self, model: str, head: dict[str, Any], *blobs: bytes) -> httpx.Response:
        """An inference request whose tensors follow the JSON as bytes."""
        text = json.dumps(head).encode()
        headers = {"inference-header-content-length": str(len(text))}
        return self.call(
            "POST", f"/v2/models/{model}/infer", content=b"".join([text, *blobs]), headers=headers
        )

    def check_healthy(self) -> None:
        """Normal requests still work."""
        assert self.embed(input="a cat").json()["data"][0]["embedding"] == [4.0, 27.0, 1.0, 2.0]
        good = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
        assert self.infer("double", good).json()["outputs"][0]["data"] == [3.0] * 8

    def requests(self, **labels: str) -> float:
        return self.metrics.value("servax_requests_total", **labels)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture(scope="module")
def live_site() -> Iterator[tuple[Site, str]]:
    """A site and its URL on a real socket."""
    site = Site()
    with running(site.app) as url:
        yield site, url


@pytest.fixture
def refused(site: Site) -> Callable[..., str]:
    """Checks that an answer is a 4xx whose message holds some words, that a normal request works after."""

    def check(response: httpx.Response, status: int, reason: str, *words: str) -> str:
        assert response.status_code == status, response.text
        body = response.json()
        error = body["error"]
        message, code = (
            (error["message"], error["code"]) if isinstance(error, dict) else (error, body["reason"])
        )
        assert code == reason
        for word in words:
            assert word in message
        assert message.count(";") >= 1, "rule, value; remedy"
        site.check_healthy()
        return str(message)

    return check
