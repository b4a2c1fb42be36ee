"""Products in bfloat16 with matrices in panels, in pairs and widened, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import load, native, panels, tiny, turned
from servax.models.errors import KernelUnavailable
from servax.models.native import element, kernel

BRIEF = np.dtype(jnp.bfloat16)
# As on a machine without products of pairs, whatever this one has.
WIDENED = element.WIDENED._replace(target="servax_tests_widened")


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    try:
        kernel.register(WIDENED)
    except KernelUnavailable as error:
        pytest.skip(str(error))
    assert native.available()


def drawn(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def rounded(x):
    return x.astype(BRIEF).astype(np.float64)


def made(kernels, word=None):
    words = {} if word is None else {"word": word}
    out = panels.panels({"layers": {"map": {"kernel": kernels}}, **words}, tables=bool(words), dtype=BRIEF)
    return out["layers"]["map"]["kernel"], out.get("word")


def close(got, x, matrix):
    """Within what sums in float32 may lose, in any order, where what is subnormal may count as zero."""
    x, matrix = rounded(x), rounded(matrix)
    room = (x.shape[-1] + 1) * (2.0**-23 * (abs(x) @ abs(matrix)) + 2.0**-126)
    assert got.dtype == np.float32
    assert (abs(got - x @ matrix) <= room).all()


def times(how, kernels, layer, x):
    if how is None:
        return panels.product(kernels, layer, x)
    return native.product(x, kernels.values, layer, features=kernels.features, element=how)


@pytest.mark.parametrize("how", [None, WIDENED], ids=["of_this_machine", "widened"])
@settings(max_examples=25)
@given(
    rows=st.integers(1, 150),
    features=st.integers(1, 130),
    outputs=st.integers(1, 200),
    asked=st.integers(-2, 3),
    scale=st.sampled_from([1.0, 1e-20, 1e15]),
    data=st.data(),
)
def test_products_equal_numpy(how, rows, features, outputs, asked, scale, data):
    """A layer outside is the nearest; a row is the same to the bit in any company, and spoils no other."""
    kernels, x = drawn(2, features, outputs, scale=scale), drawn(rows, features, seed=1, scale=scale)
    first, odd = sorted(data.draw(st.integers(0, rows - 1)) for _ in range(2))
    spoilt = x.copy()
    spoilt[odd, data.draw(st.integers(0, features - 1))] = data.draw(st.sampled_from([np.nan, np.inf]))
    parts = [x, spoilt, x[first : odd + 1], x[odd : odd + 1]]
    run = jax.jit(lambda kernels, layer, parts: [times(how, kernels, layer, one) for one in parts])
    whole, beside, some, one = map(np.asarray, run(made(kernels)[0], np.int32(asked), parts))
    close(whole, x, kernels[min(max(asked, 0), 1)])
    np.testing.assert_array_equal(some, whole[first : odd + 1])
    np.testing.assert_array_equal(one, whole[odd : odd + 1])
    others = np.arange(rows) != odd
    np.testing.assert_array_equal(beside[others], whole[others])
    assert not np.isfinite(beside[odd]).any()


@pytest.mark.parametrize("features", [36, 37])
@pytest.mark.parametrize("words", [1, 48, 259])
def test_a_table_gives_scores_and_words(words, features):
    table, x = drawn(words, features), drawn(5, features, seed=1)
    held = made(drawn(1, 4, 4), table)[1]
    ids = np.random.default_rng(3).integers(-5, words + 5, 40).astype(np.int32)
    scores, found = jax.jit(lambda held, x, ids: (panels.scores(held, x), panels.rows(held, ids)))(
        held, x, ids
    )
    close(np.asarray(scores), x, table.T)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rounded(table)[np.clip(ids, 0, words - 1)])


def test_pairs_of_features_lie_side_by_side_and_an_odd_one_beside_zero():
    kernels = drawn(1, 3, 2)
    values = made(kernels)[0].values
    assert values.shape == (1, 1, 2, native.tile().width, 2)
    np.testing.assert_array_equal(values[0, 0, 0, :2].astype(np.float64), rounded(kernels[0, :2].T))
    np.testing.assert_array_equal(values[0, 0, 1, :2, 0].astype(np.float64), rounded(kernels[0, 2]))
    assert not values[0, 0, 1, :, 1].any()
    assert not values[0, 0, :, 2:].any()


def test_what_is_not_multiplied_is_rounded_too_and_what_is_no_matrix_stays():
    kernels, bias, table = drawn(2, 8, 6), drawn(2, 6), drawn(9, 8)
    tree = {"layers": {"map": {"kernel": kernels, "bias": bias}}, "word": table, "head": table, "norm": bias}
    out = panels.panels(tree, tables=True, dtype=BRIEF)
    assert isinstance(out["head"], panels.Panels)
    np.testing.assert_array_equal(out["word"].astype(np.float64), rounded(table))
    assert out["word"].dtype == BRIEF
    assert out["layers"]["map"]["bias"] is bias
    assert out["norm"] is bias


def test_shapes_may_be_symbols():
    batch, length = jax.export.symbolic_shape("batch, length")
    values, table = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made(drawn(2, 23, 50), drawn(9, 23))
    )
    x = jax.ShapeDtypeStruct((batch, length, 23), jnp.float32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    assert jax.eval_shape(panels.product, values, layer, x).shape == (batch, length, 50)
    ids = jax.ShapeDtypeStruct((batch,), jnp.int32)
    assert jax.eval_shape(panels.rows, table, ids).shape == (batch, 23)


@pytest.mark.parametrize("kernel_here", [True, False])
def test_models_in_bfloat16_are_in_panels_where_there_is_the_kernel(kernel_here, monkeypatch):
    if not kernel_here:
        monkeypatch.setattr(native, "available", lambda: False)
    kind = panels.Panels if kernel_here else turned.Turned
    for model in (tiny(weights="bfloat16"), load("minilm", dtype="bfloat16")):
        found = [one["kernel"] for one in model.params["layers"].values() if "kernel" in one]
        assert found
        assert all(isinstance(one, kind) for one in found)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {BRIEF}
