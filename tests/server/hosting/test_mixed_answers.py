"""Requests that share a window and differ in dtypes, optional inputs, outputs or parameters."""

import asyncio

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache import Servable
from servax.server import ModelError, Server
from servax.server.errors import NanOutput
from servax.server.hosting.programs import Programs
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics


def together(server, records, *items):
    """Answers of items that waited in one window, each by output name."""
    records.clear()
    model = server.model()
    futures = [model.run_threaded([item]) for item in items]
    names = [leaf.name for leaf in model.outputs]
    return [dict(zip(names, future.result(30.0)[0], strict=True)) for future in futures]


# -- two dtypes ------------------------------------------------------------------------------------------


def both(*, tag, whole, real):
    return {"whole": whole * 3, "real": real * 3, "tag": tag}


def test_P7_two_dtypes_in_one_window_keep_their_own():
    servable = Servable(
        both,
        inputs={"tag": "int32[]", "whole": "int32[1]? = 0", "real": "float32[1]? = 0"},
        limits={"batch": 4},
        scheme={"batch": [4]},
    )
    records = []
    one = np.float32(1.0)
    items = [
        {"whole": np.array([1], np.int32)},
        {"real": np.array([0.5], np.float32)},
        {"real": np.array([one])},
        {"whole": one.reshape(1).view(np.int32)},  # the same four bytes
    ]
    items = [one | {"tag": np.int32(place)} for place, one in enumerate(items)]
    with Server(servable, max_wait_s=30.0, on_batch=records.append) as server:
        got = together(server, records, *items)
    assert [record.rows for record in records] == [4]
    assert [int(one["tag"]) for one in got] == [0, 1, 2, 3]
    assert all(one["whole"].dtype == np.int32 and one["real"].dtype == np.float32 for one in got)
    assert [int(one["whole"][0]) for one in got] == [3, 0, 0, int(np.int64(3 * 0x3F800000).astype(np.int32))]
    assert [float(one["real"][0]) for one in got] == [0.0, 1.5, 3.0, 0.0]


@pytest.mark.parametrize("value", [[1, 0, 5], [1, 0, 7]])
def test_P7_all_bytes_of_a_control_input_count(value):
    servable = Servable(
        lambda *, x, control: x[:, :1] * 0 + control.astype(jnp.float32),
        inputs={"x": "float32[length]", "control": "int32[3]"},
        limits={"batch": 2, "length": 4},
        scheme={"batch": [2], "length": [4]},
    )
    other = [1, 0, 12 - value[2]]
    items = [{"x": np.zeros(2, np.float32), "control": np.array(one, np.int32)} for one in (value, other)]
    records = []
    with Server(servable, max_wait_s=30.0, on_batch=records.append) as server:
        got = together(server, records, *items)
    assert [record.rows for record in records] == [2]
    assert [one["output"].tolist() for one in got] == [value, other]


# -- optional inputs, requested outputs, parameters ------------------------------------------------------


def warm(*, x, z, temperature):
    return {"y1": x.sum(1) + z, "y2": x.sum(1) * 10 + z + temperature}


def asked(inputs, output):
    rows = [
        {"name": name, "shape": [1, *np.shape(value)], "datatype": "FP32", "data": np.ravel(value).tolist()}
        for name, value in inputs.items()
    ]
    return {"inputs": rows, "outputs": [{"name": output}]}


def test_P8_each_request_has_its_own_inputs_outputs_and_parameters():
    servable = Servable(
        warm,
        inputs={"x": "float32[2]", "z": "float32[]? = 0", "temperature": "float32[]"},
        limits={"batch": 2},
        scheme={"batch": [2]},
        name="warm",
    )
    records = []
    bodies = [
        asked({"x": [1.0, 2.0], "temperature": 0.0}, "y1"),
        asked({"x": [1.0, 2.0], "z": 100.0, "temperature": 1.0}, "y2"),
    ]
    with Server(servable, max_wait_s=30.0, on_batch=records.append) as server:
        app = create_app(server, texts={}, metrics=Metrics())

        async def go():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                calls = [client.post("/v2/models/warm/infer", json=body) for body in bodies]
                return await asyncio.gather(*calls)

        answers = [answer.json()["outputs"] for answer in asyncio.run(go())]
    assert [record.rows for record in records] == [2]
    assert [[(one["name"], one["data"]) for one in outputs] for outputs in answers] == [
        [("y1", [3.0])],
        [("y2", [131.0])],
    ]


# -- values at the edge ----------------------------------------------------------------------------------


def probabilities(*, logits, mask):
    """Softmax over the real logits of each row."""
    return {"p": jax.nn.softmax(logits, axis=1, where=mask)}


def test_P10_probabilities_of_extreme_logits_are_finite_and_sum_to_one():
    servable = Servable(
        probabilities,
        inputs={"logits": "float32[classes]", "mask": "mask[classes]"},
        limits={"batch": 4, "classes": 4},
        scheme={"batch": [4], "classes": [4]},
    )
    records = []
    rows = [[-100.0, 1.0], [1000.0, -1000.0], [-1000.0]]
    items = [{"logits": np.array(row, np.float32)} for row in rows]
    options = Programs(check_outputs=True)
    with Server(servable, max_wait_s=0.2, on_batch=records.append, programs=options) as server:
        got = [one["p"] for one in together(server, records, *items)]
    assert sum(record.rows for record in records) == len(items)
    for row, p in zip(rows, got, strict=True):
        assert p.shape == (len(row),)
        assert np.isfinite(p).all()
        assert p.sum() == pytest.approx(1.0, abs=1e-6)
    assert got[1].tolist() == [1.0, 0.0]
    assert got[2].tolist() == [1.0]


def unit(*, x, mask):
    """Divides by the norm, and keeps zero at zero."""
    x = jnp.where(mask, x, 0.0)
    square = jnp.sum(x * x, axis=1, keepdims=True)
    return {"y": jnp.where(square > 0, x * jax.lax.rsqrt(jnp.where(square > 0, square, 1.0)), 0.0)}


def test_P10_a_zero_vector_stays_zero_and_a_nan_row_is_counted_apart():
    servable = Servable(
        lambda *, x, mask: jax.tree.map(lambda y: jnp.where(x[:, :1] == 7, jnp.nan, y), unit(x=x, mask=mask)),
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"batch": 3, "length": 4},
        scheme={"batch": [3], "length": [4]},
        name="unit",
    )
    metrics = Metrics()
    with Server(servable, max_wait_s=30.0, programs=Programs(check_outputs=True)) as server:
        app = create_app(server, texts={}, metrics=metrics)

        async def go():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                calls = [
                    client.post(
                        "/v2/models/unit/infer",
                        json={
                            "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [*values]}]
                        },
                    )
                    for values in ((0.0, 0.0), (7.0, 1.0), (3.0, 4.0))
                ]
                return await asyncio.gather(*calls)

        zero, bad, good = asyncio.run(go())
    assert zero.json()["outputs"][0]["data"] == [0.0, 0.0]
    assert good.json()["outputs"][0]["data"] == pytest.approx([0.6, 0.8])
    assert bad.status_code == 500
    assert NanOutput.reason in bad.text
    assert NanOutput.reason != ModelError.reason
    counted = {"model": "unit", "route": "infer"}
    for outcome, reason, count in (("error", NanOutput.reason, 1), ("ok", "", 2)):
        value = metrics.value("servax_requests_total", **counted, outcome=outcome, reason=reason)
        assert value == count
