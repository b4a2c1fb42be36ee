"""The device thread over real programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import SealedError, Servable
from servax.server import Server
from servax.server.batching.fake_device import FakeDevice


@pytest.fixture(scope="module")
def real():
    """A server over real programs: doubles x, and counts the real elements of a row."""

    def apply(params, x, mask):
        total = jnp.sum(jnp.where(mask, x, 0), axis=1)
        return {"twice": x * params["factor"], "total": total, "shifted": jnp.pad(x, ((0, 0), (1, 0)))}

    servable = Servable(
        apply,
        {"factor": np.float32(2)},
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"batch": 4, "length": 16},
        scheme="powers_of_two:8",
    )
    with Server(servable) as server:
        yield server


def test_every_length_and_row_count_is_right_on_jax(real, compiles):
    rng = np.random.default_rng(1)
    with compiles.none():
        for rows in range(1, 10):
            for length in (1, 7, 8, 9, 16):
                x = rng.normal(size=(rows, length)).astype(np.float32)
                out = real(x)
                assert np.array_equal(out["twice"], 2 * x)
                assert np.allclose(out["total"], x.sum(1), rtol=1e-5, atol=1e-5)
                assert np.array_equal(out["shifted"], np.pad(x, ((0, 0), (1, 0))))


def test_C2_random_requests_compile_nothing(real, compiles):
    rng = np.random.default_rng(2)
    items = [{"x": rng.normal(size=int(n)).astype(np.float32)} for n in rng.integers(1, 17, 3000)]
    with compiles.none():
        answers = real.map(items)
    assert all(
        np.array_equal(answer["twice"], 2 * one["x"]) for one, answer in zip(items, answers, strict=True)
    )


def test_C2_off_the_grid_nothing_runs_and_nothing_compiles(real, compiles):
    with compiles.none(), pytest.raises(SealedError, match="bucket 5x16 is not warm"):
        real.model().cache.get(Bucket(("batch", "length"), (5, 16)))


def test_C2_a_sealed_process_still_answers():
    servable = Servable(lambda x: x * 2, inputs={"x": "float32[length]"}, limits={"batch": 2, "length": 8})
    with Server(servable, seal=True) as server:
        assert np.array_equal(server([1.0, 2.0]), [2.0, 4.0])
    jax.jit(lambda x: x + 1)(1.0)  # the seal is lifted with the server


def test_the_fake_device_computes_what_jax_does(doubling):
    device = FakeDevice()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Server(doubling(), compile_program=device.compile) as fake, Server(doubling()) as true:
        assert np.array_equal(fake(x), true(x))
