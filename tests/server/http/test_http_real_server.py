"""The real engine behind the real socket: many clients, ragged rows, casts, and no compile after ready."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import servax
import tritonclient.http as triton
from servax.server.fake import FakeTokenizer
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.metrics import Metrics
from servax.server.seam import Engine
from servax.server.text import Embedder


def embed(params: Any, *, ids: Any, mask: Any) -> dict[str, Any]:
    real = jnp.where(mask, ids, 0)
    count = mask.sum(1)
    last = jnp.take_along_axis(ids, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    columns = [count, real.sum(1), ids[:, 0], last]
    return {"embedding": jnp.stack(columns, 1).astype(jnp.float32) * params}


def double(params: Any, *, x: Any) -> dict[str, Any]:
    return {"y": x * params}


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Metrics, servax.Server]]:
    metrics = Metrics()
    server = servax.Server(
        servax.Servable(
            embed,
            jnp.float32(1),
            inputs={"ids": "int32[length]", "mask": "mask[length]"},
            limits={"length": 16, "batch": 8},
            scheme="powers_of_two:8",
            name="toy",
        ),
        servax.Servable(
            double,
            jnp.bfloat16(2),
            inputs={"x": "bfloat16[length]"},
            limits={"length": 16, "batch": 4},
            scheme="powers_of_two:8",
            name="double",
        ),
        on_batch=metrics.batch_record,
    )
    engine: Engine = server
    with server:
        texts = {"toy": Embedder(engine.models["toy"], FakeTokenizer())}
        with running(create_app(engine, texts=texts, metrics=metrics)) as url:
            yield url, metrics, server


def expected(ids: list[int]) -> list[float]:
    return [len(ids), sum(ids), ids[0], ids[-1]]


def test_many_clients_get_their_own_answers(site: tuple[str, Metrics, servax.Server]) -> None:
    url, metrics, _ = site
    rng = np.random.default_rng(0)
    requests = [
        [rng.integers(0, 1000, rng.integers(1, 17)).tolist() for _ in range(rng.integers(1, 12))]
        for _ in range(200)
    ]

    async def go() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            calls = (client.post("/v1/embeddings", json={"model": "toy", "input": r}) for r in requests)
            return await asyncio.gather(*calls)

    for request, response in zip(requests, asyncio.run(go()), strict=True):
        assert response.status_code == 200, response.text
        assert [item["embedding"] for item in response.json()["data"]] == [expected(ids) for ids in request]
        assert response.json()["usage"]["prompt_tokens"] == sum(map(len, request))
    labels = {"model": "toy", "route": "embeddings", "outcome": "ok", "reason": ""}
    assert metrics.value("servax_requests_total", **labels) >= 200
    assert metrics.value("servax_compiles_total", phase="request") == 0


def test_V1_V5_V6_over_the_real_engine(site: tuple[str, Metrics, servax.Server]) -> None:
    client = triton.InferenceServerClient(site[0].removeprefix("http://"))
    rows = np.array([[0.1, 3.0]], ml_dtypes.bfloat16)
    x = triton.InferInput("x", [1, 2], "BF16")
    x.set_data_from_numpy(rows)
    answer = client.infer("double", [x]).as_numpy("y")
    np.testing.assert_array_equal(answer.astype(np.float32), [[0.2001953125, 6.0]])
    ids = triton.InferInput("ids", [2, 3], "INT64")
    ids.set_data_from_numpy(np.array([[5, 6, 7], [8, 9, 10]], np.int64))
    answer = client.infer("toy", [ids]).as_numpy("embedding")
    assert answer.tolist() == [expected([5, 6, 7]), expected([8, 9, 10])]
    empty = triton.InferInput("ids", [0, 3], "INT64")
    empty.set_data_from_numpy(np.zeros((0, 3), np.int64))
    assert client.infer("toy", [empty]).as_numpy("embedding").shape == (0, 4)
    client.close()


def test_bad_requests_leave_the_engine_as_it_was(site: tuple[str, Metrics, servax.Server]) -> None:
    url, _, server = site
    nan = {"name": "x", "shape": [1, 1], "datatype": "BF16", "parameters": {"binary_data_size": 2}}
    with httpx.Client(base_url=url) as client:
        for inputs in ([], [{"name": "x", "shape": [1, 17], "datatype": "BF16", "data": [0] * 17}], [nan]):
            assert client.post("/v2/models/double/infer", json={"inputs": inputs}).status_code == 400
        priority = {"priority": 99}
        good = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        body = {"inputs": [good], "parameters": priority}
        assert client.post("/v2/models/double/infer", json=body).status_code == 400
        answer = client.post(
            "/v2/models/double/infer", json={"inputs": [good], "parameters": {"priority": 1}}
        )
        assert answer.json()["outputs"][0] == {
            "name": "y",
            "datatype": "BF16",
            "shape": [1, 2],
            "data": [2.0, 4.0],
        }
    assert not any(server.load().values())
