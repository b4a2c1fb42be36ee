"""Products with matrices held as (out, in), in each of the ways that the number of rows chooses."""

import jax
import numpy as np
import pytest
from servax.models import turned


@pytest.mark.parametrize("rows", [1, 2, 7, 48, 49])
def test_products_are_those_of_the_matrix_that_was_turned(rows):
    rng = np.random.default_rng(rows)
    kernels, x = (rng.normal(size=size).astype(np.float32) for size in ((3, 24, 40), (rows, 24)))
    made = turned.turned({"layers": {"map": {"kernel": kernels, "bias": kernels[:, 0]}}, "word": x})
    assert made["word"] is x
    assert made["layers"]["map"]["bias"] is not None
    of_layer = jax.jit(turned.product)
    for layer in range(3):
        got = of_layer(made["layers"]["map"]["kernel"], np.int32(layer), x)
        np.testing.assert_allclose(got, x @ kernels[layer], rtol=0, atol=1e-4)
    shaped = jax.jit(turned.scores)(kernels[0].T, x.reshape(rows, 1, 24))
    np.testing.assert_allclose(shaped, (x @ kernels[0])[:, None], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 60])
def test_a_row_that_is_not_finite_stays_alone(rows):
    x = np.ones((rows + 1, 8), np.float32)
    x[-1, 3] = np.nan
    got = np.asarray(jax.jit(turned.scores)(np.ones((6, 8), np.float32), x))
    assert np.isnan(got[-1]).all()
    assert (got[:-1] == 8).all()
