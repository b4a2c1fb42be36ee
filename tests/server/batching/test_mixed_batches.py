"""Requests that differ in shape, controls or optional inputs and share a batch: each equals itself alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache import BACKGROUND, Servable, compile_log
from servax.server import BadTensor, Server
from servax.server.hosting.programs import Programs


def weighted(*, x, mask, control, z):
    """Takes both kinds of numbers: floats that are padded, and integers that decide."""
    picked = jnp.where(mask, x, jnp.float32(0)).sum(1)
    return {"sum": picked * control.sum(1) + z, "control": control[:, ::-1]}


@pytest.fixture(scope="module")
def server():
    servable = Servable(
        weighted,
        inputs={
            "x": "float32[length]",
            "mask": "mask[length]",
            "control": "int32[3]",
            "z": "float32[]? = 0",
        },
        limits={"batch": 4, "length": 8},
        scheme={"batch": [1, 4], "length": [8]},
    )
    records = []
    with Server(servable, max_wait_s=30.0, on_batch=records.append) as one:
        yield one, records


def together(server, items, eventually):
    """Answers of four items that ran in one batch, and of each alone."""
    one, records = server
    records.clear()
    model = one.model()
    futures = [model.run_threaded([item]) for item in items]
    got = [future.result(30.0)[0] for future in futures]
    eventually(lambda: [record.rows for record in records] == [4])
    order = [leaf.name for leaf in model.outputs]
    return [dict(zip(order, row, strict=True)) for row in got]


def expected(item):
    scale = np.sum(item["control"])
    return np.sum(item["x"]) * scale + item.get("z", 0)


def items_of(*given):
    return [
        {
            name: np.asarray(value, np.int32 if name == "control" else np.float32)
            for name, value in one.items()
        }
        for one in given
    ]


def test_P7_pairs_that_differ_in_shape_or_control_each_equal_alone(server, eventually):
    items = items_of(
        {"x": [1, 2], "control": [1, 0, 5]},
        {"x": [1, 2, 3], "control": [1, 0, 5]},
        {"x": [1, 2], "control": [1, 0, 7]},
        {"x": [1], "control": [0, 0, 7]},
    )
    for got, item in zip(together(server, items, eventually), items, strict=True):
        assert got["sum"] == pytest.approx(expected(item))
        assert np.array_equal(got["control"], item["control"][::-1])
        assert got["sum"].dtype == np.float32
        assert got["control"].dtype == np.int32


def test_P7_a_declared_dtype_is_not_merged_with_another(server):
    one, _ = server
    with pytest.raises(BadTensor, match="int32"):
        one.model().run_threaded([{"x": np.ones(2, np.float32), "control": np.array([0.5, 0, 0])}])
    with pytest.raises(BadTensor, match="control"):
        one.model().run_threaded([{"x": np.ones(2, np.float32), "control": np.zeros(2, np.int32)}])


def test_P8_an_optional_input_reaches_its_own_caller_only(server, eventually):
    items = items_of(
        {"x": [1, 2], "control": [1, 0, 0]},
        {"x": [1, 2], "control": [1, 0, 0], "z": 100.0},
        {"x": [3], "control": [1, 0, 0]},
        {"x": [3], "control": [1, 0, 0], "z": -1.0},
    )
    got = together(server, items, eventually)
    assert [float(one["sum"]) for one in got] == [3.0, 103.0, 3.0, 2.0]


def test_C9_twenty_programs_are_what_they_are_one_by_one_and_nothing_else_compiles():
    """Four callers ask for twenty programs; diagnostics of the compile thread are not theirs."""
    servable = Servable(
        lambda x: jnp.cumsum(x * 3, 1),
        inputs={"x": "float32[length]"},
        limits={"batch": 1, "length": 20},
        scheme={"batch": [1], "length": list(range(1, 21))},
    )
    phases = []
    unsubscribe = compile_log().subscribe(lambda phase, seconds: phases.append(phase))
    try:
        with Server(servable, programs=Programs(policy="background", budget_bytes=1)) as server:
            server._warmup.join(30.0)
            phases.clear()
            futures = [
                server.model().run_threaded([{"x": np.arange(length, dtype=np.float32)}])
                for length in range(1, 21)
                for _ in range(4)
            ]
            for place, future in enumerate(futures):
                length = place // 4 + 1
                assert np.array_equal(future.result(60.0)[0][0], np.cumsum(3 * np.arange(length)))
            for _ in range(200):
                server._compiler.submit(lambda: None).result()
                if len(server.model().grid) == 20:
                    break
                length = min(set(range(1, 21)) - {one["length"] for one in server.model().grid})
                server(np.ones(length, np.float32))
            assert len(server.model().grid) == 20
            assert set(phases) == {BACKGROUND}
    finally:
        unsubscribe()


def test_a_sealed_server_gives_back_what_traces_left_behind():
    before = jax.jit(lambda x: x + 1)
    before(jnp.ones(3))
    servable = Servable(
        lambda x: x * 2, inputs={"x": "float32[length]"}, limits={"batch": 1, "length": 8}, scheme=[8]
    )
    with Server(servable, seal=True) as server:
        assert before._cache_size() == 0
        assert np.array_equal(server(np.ones(3, np.float32)), [2, 2, 2])
