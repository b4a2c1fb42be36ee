"""The default model in a real process: golden answers, odd inputs, and load without one compile."""

import asyncio
import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CLIENTS, REQUESTS = 64, 2000


def golden() -> tuple[list[dict[str, Any]], np.ndarray]:
    return json.loads((GOLDEN / "minilm_texts.json").read_text()), np.load(GOLDEN / "minilm_embeddings.npy")


def embed(served: Any, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/embeddings", json={"model": "minilm", **body}, timeout=60)


def vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data], np.float32)


def test_W3_live_before_ready(served: Any) -> None:
    assert served.seen_before_ready, "never seen warming up"
    assert set(served.seen_before_ready) == {(200, 503)}


def test_golden_texts_alone_and_together(served: Any) -> None:
    texts, expected = golden()
    together = vectors(embed(served, {"input": [one["text"] for one in texts], "truncate": True}))
    alone = np.concatenate(
        [vectors(embed(served, {"input": one["text"], "truncate": True})) for one in texts]
    )
    for got in (together, alone):
        assert np.abs(got - expected).max() <= 1e-5
        assert (got * expected).sum(1).min() >= 0.99999


def test_golden_token_ids(served: Any) -> None:
    texts, expected = golden()
    got = vectors(embed(served, {"input": [one["input_ids"] for one in texts]}))
    assert np.abs(got - expected).max() <= 1e-5


def test_odd_inputs_have_defined_answers(served: Any) -> None:
    assert embed(served, {"input": []}).json()["data"] == []
    assert [embed(served, {"input": one}).status_code for one in ("", [""], [[]])] == [400] * 3
    assert vectors(embed(served, {"input": " "})).shape == (1, 384)
    assert vectors(embed(served, {"input": [101]})).shape == (1, 384)
    assert vectors(embed(served, {"input": "🦊🦊 héllo 世界"})).shape == (1, 384)
    assert vectors(embed(served, {"input": [101] + [7592] * 254 + [102]})).shape == (1, 384)


@pytest.mark.parametrize(
    "long", ["word " * 10_000, [101] + [7592] * 255 + [102]], ids=["10,000 words", "limit + 1 tokens"]
)
def test_too_long_is_refused_or_cut_and_said(served: Any, long: Any) -> None:
    refused = embed(served, {"input": long})
    assert refused.status_code == 400
    assert "256" in refused.json()["error"]["message"]
    cut = embed(served, {"input": long, "truncate": True})
    assert vectors(cut).shape == (1, 384)
    assert cut.json()["truncated"][0]["to"] == 256
    assert vectors(embed(served, {"input": "a cat"})).shape == (1, 384)


def test_load_without_a_compile(served: Any) -> None:
    with gzip.open(resources.files("servax.experiments") / "data" / "texts.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines][:REQUESTS]
    before = served.metrics()
    statuses = asyncio.run(_storm(f"{served.url}/v1/embeddings", texts))
    assert statuses == {200: REQUESTS}
    after = served.metrics()
    # Not one compile in any phase, let alone in the request's.
    for name in (one for one in after if one.startswith("servax_compiles_total")):
        assert after[name] == before.get(name, 0.0), name
    assert after['servax_compiles_total{phase="request"}'] == 0


async def _storm(url: str, texts: list[str]) -> dict[int, int]:
    statuses: dict[int, int] = {}
    waiting = iter(texts)

    async def client() -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            for text in waiting:
                body = {"model": "minilm", "input": text, "truncate": True}
                status = (await http.post(url, json=body)).status_code
                statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return statuses
