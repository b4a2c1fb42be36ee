"""Products with matrices in panels against NumPy in float64: sizes, neighbours, threads and what is odd."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import native, panels
from servax.models.errors import KernelUnavailable


@pytest.fixture(scope="module", autouse=True)
def _kernel():
    try:
        native.tile()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    assert native.available()


def drawn(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def made(kernels, word=None):
    params = {"layers": {"map": {"kernel": kernels}}, "word": word}
    out = panels.panels(params, tables=word is not None)
    return out["layers"]["map"]["kernel"], out["word"]


def close(got, x, matrix):
    """Within what sums in float32 may lose, in any order, where what is subnormal may count as zero."""
    x, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    room = x.shape[-1] * (2.0**-23 * (abs(x) @ abs(matrix)) + 2.0**-126)
    assert got.dtype == np.float32
    assert (abs(got - x @ matrix) <= room).all()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 200),
    features=st.integers(1, 130),
    outputs=st.integers(1, 200),
    layers=st.integers(1, 3),
    asked=st.integers(-3, 5),
    scale=st.sampled_from([1.0, 1e-20, 1e15]),
    data=st.data(),
)
def test_products_equal_numpy(rows, features, outputs, layers, asked, scale, data):
    """A layer outside is the nearest; a row is the same to the bit in any company, and spoils no other."""
    kernels, x = drawn(layers, features, outputs, scale=scale), drawn(rows, features, seed=1, scale=scale)
    first, odd = sorted(data.draw(st.integers(0, rows - 1)) for _ in range(2))
    spoilt = x.copy()
    spoilt[odd, data.draw(st.integers(0, features - 1))] = data.draw(st.sampled_from([np.nan, np.inf]))
    parts = [x, spoilt, x[first : odd + 1], x[odd : odd + 1]]
    # Parts are arguments: what XLA compiles beside the kernel takes longer than all else here.
    run = jax.jit(lambda kernels, layer, parts: [panels.product(kernels, layer, one) for one in parts])
    whole, beside, some, one = map(np.asarray, run(made(kernels)[0], np.int32(asked), parts))
    close(whole, x, kernels[min(max(asked, 0), layers - 1)])
    np.testing.assert_array_equal(some, whole[first : odd + 1])
    np.testing.assert_array_equal(one, whole[odd : odd + 1])
    others = np.arange(rows) != odd
    np.testing.assert_array_equal(beside[others], whole[others])
    assert not np.isfinite(beside[odd]).any()


@pytest.mark.parametrize("words", [1, 48, 50, 259])
def test_a_table_gives_scores_and_words(words):
    table, x = drawn(words, 37), drawn(5, 37, seed=1)
    held = made(drawn(1, 4, 4), table)[1]
    ids = np.random.default_rng(3).integers(-5, words + 5, 40).astype(np.int32)
    scores, found = jax.jit(lambda held, x, ids: (panels.scores(held, x), panels.rows(held, ids)))(
        held, x, ids
    )
    close(np.asarray(scores), x, table.T)
    np.testing.assert_array_equal(found, table[np.clip(ids, 0, words - 1)])


def test_leading_axes_and_no_rows_at_all():
    kernels, x = drawn(2, 24, 50), drawn(2, 3, 24, seed=1)
    values, _ = made(kernels)
    of_layer = jax.jit(panels.product)
    close(np.asarray(of_layer(values, np.int32(1), x)), x, kernels[1])
    for empty in ((0, 24), (2, 0, 24)):
        assert of_layer(values, np.int32(0), np.zeros(empty, np.float32)).shape == (*empty[:-1], 50)


def test_only_what_is_multiplied_is_put_in_panels():
    kernels, bias, table = drawn(2, 8, 6), drawn(2, 6), drawn(9, 8)
    tree = {"layers": {"map": {"kernel": kernels, "bias": bias}}, "word": table, "norm": {"scale": bias[0]}}
    tied = panels.panels(tree, tables=True)
    assert isinstance(tied["word"], panels.Panels)
    free = panels.panels({**tree, "head": table}, tables=True)
    assert isinstance(free["head"], panels.Panels)
    for other in (free, panels.panels(tree, tables=False)):
        assert isinstance(other["layers"]["map"]["kernel"], panels.Panels)
        assert other["word"] is table
        assert other["layers"]["map"]["bias"] is bias
        assert other["norm"] is tree["norm"]
    width = native.tile().width
    assert tied["word"].values.shape == (1, -(-9 // width), 8, width)
    assert tree["layers"]["map"]["kernel"] is kernels


def test_threads_share_the_pool_and_get_what_they_asked_for():
    """Large enough to hire helpers; every thread has a program, a layer and rows of its own."""
    layers, features, outputs = 4, 256, 1000
    kernels, x = drawn(layers, features, outputs), drawn(120, features, seed=1)
    values = jax.device_put(made(kernels)[0])
    of_layer = jax.jit(panels.product)
    asked = [(rows, layer) for rows in (1, 5, 70, 120) for layer in range(layers)]
    wanted = {(rows, layer): np.asarray(of_layer(values, np.int32(layer), x[:rows])) for rows, layer in asked}
    for layer in range(layers):
        close(wanted[120, layer], x, kernels[layer])

    def ask(number):
        rows, layer = asked[number % len(asked)]
        got = np.asarray(of_layer(values, np.int32(layer), x[:rows]))
        return np.array_equal(got, wanted[rows, layer])

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(480)))


def test_products_of_one_program_may_run_at_once():
    """From threads of the very pool that they hire from."""
    kernels, x = drawn(8, 64, 600), drawn(70, 64, seed=1)
    values, _ = made(kernels)

    @jax.jit
    def run(values, x):
        return jnp.stack([panels.product(values, jnp.int32(layer), x) for layer in range(8)])

    first = np.asarray(run(values, x))
    close(first, x, kernels)
    for _ in range(20):
        np.testing.assert_array_equal(run(values, x), first)


def test_shapes_may_be_symbols():
    batch, length = jax.export.symbolic_shape("batch, length")
    values, table = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made(drawn(2, 24, 50), drawn(9, 24))
    )
    x = jax.ShapeDtypeStruct((batch, length, 24), jnp.float32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    assert jax.eval_shape(panels.product, values, layer, x).shape == (batch, length, 50)
    assert jax.eval_shape(panels.scores, table, x).shape == (batch, length, 9)
    ids = jax.ShapeDtypeStruct((batch,), jnp.int32)
    assert jax.eval_shape(panels.rows, table, ids).shape == (batch, 24)


def test_derivatives_and_mapped_products_are_those_of_the_matrix():
    """Fine-tuning goes through a product; columns of nothing behind the last stay as they are."""
    kernels, x = drawn(2, 7, 50), drawn(3, 4, 7, seed=1)
    values, _ = made(kernels)

    def total(values, x):
        return jnp.sum(jnp.square(panels.product(values, jnp.int32(1), x)))

    slopes = jax.jit(jax.grad(total, (0, 1)))(values, x)
    along = 2 * x.reshape(-1, 7) @ kernels[1]
    wanted = np.zeros_like(kernels)
    wanted[1] = x.reshape(-1, 7).T @ along
    np.testing.assert_allclose(slopes[0].values, made(wanted)[0].values, atol=1e-4)
    np.testing.assert_allclose(slopes[1], (along @ kernels[1].T).reshape(x.shape), atol=1e-3)
    mapped = jax.vmap(lambda one: panels.product(values, jnp.int32(1), one))(x)
    close(np.asarray(mapped), x, kernels[1])
