"""Pinned requests: the same answer, bit by bit, at any load."""

import asyncio
import threading

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Servable
from servax.server import Pin, Server, pinned
from servax.server.batching.request import Row
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics


def layer(weights, *, x, mask):
    """A product whose sums a compiler orders differently in different buckets."""
    hidden = jnp.tanh(jnp.where(mask[..., None], x[..., None], 0.0) * weights[0])
    return {"y": (hidden @ weights[1:]).sum((1, 2))}


@pytest.fixture(scope="module")
def served():
    weights = np.random.default_rng(0).normal(size=(65, 64)).astype(np.float32)
    servable = Servable(
        layer,
        weights,
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"batch": 8, "length": 64},
        scheme="powers_of_two:8",
        name="layer",
    )
    records = []
    with Server(servable, on_batch=records.append) as server:
        yield server, records


def items(count, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=int(n)).astype(np.float32) for n in rng.integers(1, 65, count)]


def test_P14_a_pinned_request_is_bitwise_the_same_at_any_load(served):
    server, records = served
    given = items(40)
    with pinned() as pin:
        alone = [server(x=one)["y"].tobytes() for one in given]
    named = [str(bucket) for bucket in pin.buckets]
    assert named == [f"1x{max(8, 1 << (len(one) - 1).bit_length())}" for one in given]
    records.clear()
    model, stop = server.model(), threading.Event()

    def crowd():
        while not stop.is_set():
            model.run_threaded([{"x": one} for one in items(30, seed=2)]).result(30.0)

    threads = [threading.Thread(target=crowd) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with pinned() as pin:
                futures = [model.run_threaded([{"x": one}]) for one in given]
                assert [future.result(30.0)[0][0].tobytes() for future in futures] == alone
            assert [str(bucket) for bucket in pin.buckets] == named
            with pinned() as pin:  # all in one request
                rows = model.run_threaded([{"x": one} for one in given]).result(30.0)
            assert [row[0].tobytes() for row in rows] == alone
            assert [str(bucket) for bucket in pin.buckets] == named
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {record.rows for record in records} & {4, 8}  # the others were batched meanwhile


def test_P14_the_reply_names_the_bucket(served):
    server, _ = served
    app = create_app(server, texts={}, metrics=Metrics())
    one = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}]}

    async def go(**parameters):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            return await client.post("/v2/models/layer/infer", json=one | {"parameters": parameters})

    reply = asyncio.run(go(deterministic=True)).json()
    assert reply["parameters"] == {"buckets": '["1x8"]'}
    assert "parameters" not in asyncio.run(go(deterministic=False)).json()
    assert asyncio.run(go(deterministic="yes")).status_code == 400


def test_rows_of_the_same_bucket_share_it(serve, doubling):
    server, device = serve(doubling(batch=4, length=16, scheme={"batch": [4], "length": [8, 16]}))
    device.hold()
    first = server.model().run_threaded([{"x": np.zeros(3, np.float32)}])
    assert device.held.wait(20.0)
    device.runs.clear()
    with pinned() as pin:
        rows = [{"x": np.full(size, size, np.float32)} for size in (3, 12, 5, 16, 8)]
        answer = server.model().run_threaded(rows)
    plain = server.model().run_threaded([{"x": np.ones(2, np.float32)}])
    device.release()
    assert [row[0].tolist() for row in answer.result(20.0)] == [[2.0 * n] * n for n in (3, 12, 5, 16, 8)]
    assert plain.result(20.0)[0][0].tolist() == [2.0, 2.0]
    first.result(20.0)
    assert [str(bucket) for bucket in pin.buckets] == ["4x8", "4x16", "4x8", "4x16", "4x8"]
    assert [str(run.bucket) for run in device.runs] == ["4x8", "4x16", "4x8"]


def test_a_pin_ends_with_its_block():
    from servax.server.batching.pins import pin_of_call

    assert pin_of_call() is None
    with pinned() as outer:
        assert pin_of_call() is outer
        with pinned() as inner:
            assert pin_of_call() is inner
        assert pin_of_call() is outer
    assert pin_of_call() is None
    assert Pin().buckets == []


def test_P14_halves_of_a_failed_batch_stay_where_they_were_pinned(served, ask):
    server, _ = served
    request = ask(3)
    rows, bucket = [Row(request, 0)], Bucket(("batch", "length"), (8, 64))
    assert server.model().smallest(bucket, rows) != bucket
    request.pin = Pin([None])
    assert server.model().smallest(bucket, rows) == bucket
