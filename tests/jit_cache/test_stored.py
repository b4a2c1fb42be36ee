"""Programs by way of the store: what is loaded runs as what was compiled."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servax
from servax.bucketing import Bucket
from servax.jit_cache import SignatureError, StoredPrograms
from servax.jit_cache.store import Store


def partly_used(params: Any, ids: Any, mask: Any, lengths: Any) -> Any:
    """Uses neither `lengths` nor the last parameter."""
    return {"sum": jnp.where(mask, params["table"][ids], 0.0).sum(1) + params["bias"]}


def make(apply: Any = partly_used) -> servax.Servable:
    rng = np.random.default_rng(0)
    params = {
        "table": rng.random(50, np.float32),
        "bias": np.float32(1),
        "unused": np.ones((3, 3), np.float32),
    }
    return servax.Servable(
        apply,
        params,
        inputs={"ids": "int32[length]", "mask": "mask[length]", "lengths": "lengths[length]"},
        limits={"length": 16, "batch": 2},
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "programs", home=tmp_path / "home", trial=None)


def run(source: StoredPrograms, servable: servax.Servable) -> tuple[str, np.ndarray]:
    bucket = Bucket.parse("2x16", servable.grid.axes)
    program = source(servable, bucket, [jax.device_put(leaf) for leaf in servable.leaves])
    inputs = {
        "ids": np.arange(32, dtype=np.int32).reshape(2, 16),
        "mask": np.ones((2, 16), np.bool_),
        "lengths": np.full(2, 16, np.int32),
    }
    return program.facts.source, np.asarray(program(inputs)[0])


def test_the_second_start_loads_and_answers_the_same(store: Store) -> None:
    first, expected = run(StoredPrograms(store), make())
    second, got = run(StoredPrograms(store), make())
    assert (first, second) == ("compiled", "store")
    np.testing.assert_array_equal(got, expected)
    params = np.random.default_rng(0).random(50, np.float32)
    np.testing.assert_allclose(got, params[np.arange(32).reshape(2, 16)].sum(1) + 1, rtol=1e-6)


def test_a_server_over_a_full_store_compiles_nothing(store: Store) -> None:
    with servax.Server(make(), compile_program=StoredPrograms(store)) as server:
        expected = server(ids=np.arange(5, dtype=np.int32))
    with servax.Server(make(), compile_program=StoredPrograms(store)) as server:
        sources = {warm.facts.source for warm in server.model().report.warm}
        np.testing.assert_array_equal(server(ids=np.arange(5, dtype=np.int32))["sum"], expected["sum"])
    assert sources == {"store"}


def test_other_code_misses(store: Store) -> None:
    run(StoredPrograms(store), make())

    def other(params: Any, ids: Any, mask: Any, lengths: Any) -> Any:
        return {"sum": jnp.where(mask, params["table"][ids], 0.0).sum(1) + 2 * params["bias"]}

    assert run(StoredPrograms(store), make(other))[0] == "compiled"


def test_errors_of_the_model_come_through(store: Store) -> None:
    big = jnp.ones((1000, 1000))

    def closes_over(params: Any, ids: Any, mask: Any, lengths: Any) -> Any:
        return {"sum": (ids @ big[:16]) + params["bias"]}

    servable = make(closes_over)
    with pytest.raises(SignatureError):
        run(StoredPrograms(store), servable)
