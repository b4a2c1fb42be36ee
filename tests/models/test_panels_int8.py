"""Products of uint8 with int8 in panels against NumPy's integers, and models against their other forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import load, native, offset, panels_int8, quantized, tiny
from servax.models.errors import InputError, KernelUnavailable
from servax.models.native import integers, kernel
from servax.models.native.integers import Columns, Rows
from servax.models.offset import Offset
from servax.models.panels import Panels
from servax.models.quantize import quantize
from servax.models.random_model import random_params


@pytest.fixture(autouse=True)
def _kernel(request):
    if "where_it_is_not" not in request.node.name and not integers.available():
        pytest.skip("this processor has no product of uint8 and int8")


def matrices(layers, outputs, features, seed=0):
    """int8 `(out, in)` of each layer, some as far from 0 as may be, and scales."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, (layers, outputs, features), np.int8)
    values[:, 0], values[:, -1] = 127, -127
    return values, rng.normal(size=(layers, outputs)).astype(np.float32)


def held(values, scales):
    whole = panels_int8.packed(values)
    sums = values.sum(axis=2, dtype=np.int32)
    return whole, Columns(whole.values, *(panels_int8.columns(whole, one) for one in (sums, scales)))


def activations(rows, features, seed=1):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (rows, features), np.uint8)
    values[0] = 255
    return Rows(values, rng.integers(0, 256, rows, np.int32), rng.normal(size=rows).astype(np.float32))


def wanted(x, values, scales):
    values = values.astype(np.int64)
    exact = x.values.astype(np.int64) @ values.T - x.zeros[:, None].astype(np.int64) * values.sum(1)
    return exact.astype(np.float32) * x.steps[:, None] * scales


@settings(max_examples=30)
@given(
    rows=st.integers(1, 150),
    features=st.integers(1, 130),
    outputs=st.integers(1, 200),
    layers=st.integers(1, 3),
    asked=st.integers(-3, 5),
    data=st.data(),
)
def test_products_are_exact(rows, features, outputs, layers, asked, data):
    """A layer outside is the nearest; a row is the same in any company, and spoils no other."""
    values, scales = matrices(layers, outputs, features)
    whole, columns = held(values, scales)
    x = activations(rows, features)
    first, odd = sorted(data.draw(st.integers(0, rows - 1)) for _ in range(2))
    spoilt = x._replace(steps=x.steps.copy())
    spoilt.steps[odd] = np.nan
    some = Rows(*(part[first : odd + 1] for part in x))
    run = jax.jit(
        lambda columns, layer, *parts: [
            integers.product(one, columns, layer, features=whole.features) for one in parts
        ]
    )
    alone, beside, fewer = map(np.asarray, run(columns, np.int32(asked), x, spoilt, some))
    number = min(max(asked, 0), layers - 1)
    want = wanted(x, values[number], scales[number])
    assert alone.dtype == np.float32
    np.testing.assert_array_equal(alone, want)
    np.testing.assert_array_equal(fewer, want[first : odd + 1])
    others = np.arange(rows) != odd
    np.testing.assert_array_equal(beside[others], want[others])
    assert np.isnan(beside[odd]).all()


def test_many_features_of_the_largest_numbers_are_exact():
    """65,000 of them are nearly what an int32 holds."""
    values = np.full((1, 3, 65_000), 127, np.int8)
    values[0, 1] = -127
    scales = np.ones((1, 3), np.float32)
    whole, columns = held(values, scales)
    x = Rows(np.full((9, 65_000), 255, np.uint8), np.zeros(9, np.int32), np.ones(9, np.float32))
    got = jax.jit(lambda *args: integers.product(*args, features=whole.features))(x, columns, np.int32(0))
    np.testing.assert_array_equal(got, wanted(x, values[0], scales[0]))


@pytest.mark.parametrize("features", [8, 9])
def test_fours_of_features_lie_side_by_side_beside_zeros(features):
    values, scales = matrices(2, 2, features)
    whole, columns = held(values, scales)
    width = native.tile().width
    assert whole.values.shape == (2, 1, -(-features // 4), width, 4)
    np.testing.assert_array_equal(whole.values[1, 0, 0, :2], values[1, :, :4])
    np.testing.assert_array_equal(whole.values[1, 0, -1, :2, 0], values[1, :, 4 * ((features - 1) // 4)])
    assert not whole.values[:, :, :, 2:].any()
    if features == 9:
        assert not whole.values[:, :, 2, :, 1:].any()
    assert columns.scales.shape == (2, 1, width)
    np.testing.assert_array_equal(columns.scales[:, 0, :2], scales)
    assert not columns.sums[:, :, 2:].any()


def test_shapes_may_be_symbols_and_products_mapped():
    values, scales = matrices(2, 50, 23)
    whole, columns = held(values, scales)
    (rows,) = jax.export.symbolic_shape("rows")
    like = Rows(*(jax.ShapeDtypeStruct((rows, *one.shape[1:]), one.dtype) for one in activations(1, 23)))

    def run(x):
        return integers.product(x, columns, jnp.int32(1), features=whole.features)

    assert jax.eval_shape(run, like).shape == (rows, 50)
    x = activations(12, 23)
    mapped = jax.vmap(run)(Rows(*(part.reshape(3, 4, *part.shape[1:]) for part in x)))
    np.testing.assert_array_equal(mapped.reshape(12, 50), wanted(x, values[1], scales[1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, columns: (x._replace(zeros=x.zeros[1:]), columns),
        lambda x, columns: (x._replace(values=x.values.astype(np.int8)), columns),
        lambda x, columns: (x._replace(values=x.values[:, :-4]), columns),
        lambda x, columns: (x, columns._replace(sums=columns.sums[:, :, 1:])),
        lambda x, columns: (x, columns._replace(scales=columns.sums)),
    ],
)
def test_what_does_not_fit_is_refused(spoil):
    whole, columns = held(*matrices(2, 50, 24))
    args = spoil(activations(3, 24), columns)
    with pytest.raises(InputError, match="must be"):
        integers.product(*args, jnp.int32(0), features=whole.features)


def elsewhere(monkeypatch, make):
    with monkeypatch.context() as patched:
        patched.setattr(integers, "available", lambda: False)
        return make()


def kernels(params):
    return {name: leaves["kernel"] for name, leaves in params["layers"].items() if "kernel" in leaves}


def drawn(rows, features):
    """Some features larger than others, one row far larger, and one of zeros."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((rows, features), np.float32) * np.exp(rng.standard_normal(features, np.float32))
    x[0] *= 1e6
    x[-1] = 0
    return x


@pytest.mark.parametrize("rows", [2, 11])
def test_a_decoders_products_are_to_the_bit_those_of_its_other_form(rows, monkeypatch):
    config = dataclasses.replace(tiny().step.args[0], hidden_size=50, num_heads=5, num_kv_heads=5)
    params = random_params(config, 0)
    here, there = (quantize(config, params)[1], elsewhere(monkeypatch, lambda: quantize(config, params)[1]))
    product, pairs = jax.jit(quantized.product), zip(*map(kernels, (here, there)), strict=True)
    for name, _ in pairs:
        one, other = kernels(here)[name], kernels(there)[name]
        assert isinstance(one.values, Panels)
        assert isinstance(other.values, tuple)
        x = drawn(rows, other.values[0].shape[1])
        for layer in range(config.num_layers):
            args = np.int32(layer), x
            np.testing.assert_array_equal(product(one, *args), product(other, *args))
    x = drawn(rows, config.hidden_size).reshape(1, rows, -1)
    scores = jax.jit(quantized.scores)
    assert isinstance(here["head"].values, Panels)
    np.testing.assert_array_equal(scores(here["head"], x), scores(there["head"], x))


def test_an_encoders_products_are_to_the_bit_those_of_its_other_form(folder, monkeypatch):
    here = load(folder(), quantize="int8").params
    there = elsewhere(monkeypatch, lambda: load(folder(), quantize="int8").params)
    product = jax.jit(offset.product)
    for name, other in kernels(there).items():
        one = kernels(here)[name]
        assert isinstance(one.values, Panels)
        assert isinstance(one, Offset)
        x = drawn(12, other.values[0].shape[1]).reshape(3, 4, -1) + np.float32(0.5)
        for layer in range(len(other.values)):
            args = np.int32(layer), x
            np.testing.assert_array_equal(product(one, *args), product(other, *args))


def test_it_is_not_available_where_it_is_not(monkeypatch):
    """A processor without the instruction, a kernel that does not compile, and one whose trial fails."""
    find = integers._available.__wrapped__
    there = integers.available()  # which tells XLA, as can be done once
    monkeypatch.setattr(kernel, "register", lambda _: None)
    assert find() == there
    monkeypatch.setattr(integers, "product", lambda x, *_, features: jnp.zeros((len(x.values), features)))
    assert not find()

    def refuse(_):
        raise KernelUnavailable("no")

    monkeypatch.setattr(kernel, "register", refuse)
    assert not find()
    monkeypatch.setattr(integers, "tile", lambda: native.Tile(8, 3, 4, ("", "")))
    assert not find()
