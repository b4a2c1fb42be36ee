"""Matrices in panels for functions of one's own: `in_panels` and `matmul`."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import InputError, in_panels, matmul, native
from servax.models.panels import Panels, matrices


@pytest.mark.parametrize("there", [True, False])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 120), st.sampled_from(["float32", "bfloat16"]))
def test_a_product_is_that_of_numpy(there, rows, inside, outside, dtype):
    with pytest.MonkeyPatch.context() as patch:
        if not there:
            patch.setattr(native, "available", lambda: False)
        rng = np.random.default_rng(rows * inside * outside)
        x = rng.integers(-8, 9, (2, rows, inside)).astype(np.float32)
        kernel = rng.integers(-8, 9, (inside, outside)).astype(np.float32)
        held = in_panels(kernel, dtype)
        assert isinstance(held, np.ndarray) or there
        np.testing.assert_array_equal(matmul(jnp.asarray(x), held), x @ kernel)
        if isinstance(held, Panels):
            np.testing.assert_array_equal(matrices(held)[0].astype(np.float32), kernel)


def test_what_is_no_matrix_or_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"must be \(in, out\), neither of them 0, got \(3,\)"):
        in_panels(np.ones(3))
    with pytest.raises(InputError, match="float32 or bfloat16, got int8"):
        in_panels(np.ones((3, 4)), np.int8)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(InputError, match=r"must have 3 features as the kernel has, got \(2, 4\)"):
            matmul(jnp.ones((2, 4)), in_panels(np.ones((3, 5)), dtype))
