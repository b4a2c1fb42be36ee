"""Rows behind the last real one: products leave them out, and decoders answer as if they were not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import apart, load, native, pages, panels, tiny, turned
from servax.models.native import integers
from servax.models.panels import Panels

ROWS = (1, 13, 140)
FEATURES, OUTPUTS, LAYERS = 33, 53, 2


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def forms():
    """Kernels in each way that this machine has, by name, and whether rows behind the last are zeros."""
    stacked = drawn(LAYERS, FEATURES, OUTPUTS)
    tree = {"layers": {"map": {"kernel": stacked}}}
    made = {"apart": (tuple(stacked), False)}
    made |= {
        f"turned_{kind}": (_kernel(turned.turned(tree, kind)), False) for kind in ("float32", "bfloat16")
    }
    if native.available():
        for kind in ("float32", "bfloat16"):
            made[kind] = _kernel(panels.panels(tree, tables=False, dtype=np.dtype(kind))), True
    decoder = tiny(weights="int8").params["layers"]["qkv"]["kernel"]
    made["int8"] = decoder, isinstance(decoder.values, Panels)
    return made


def _kernel(params):
    return params["layers"]["map"]["kernel"]


@functools.cache
def _times():
    return jax.jit(apart.product)


NAMES = ("apart", "turned_float32", "turned_bfloat16", "float32", "bfloat16", "int8")


def multiply(name, x, layer, live=None):
    if name not in forms():
        pytest.skip("no kernel for this machine")
    return np.asarray(_times()(forms()[name][0], np.int32(layer), x, live))


def features_of(name):
    return 32 if name == "int8" else FEATURES


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(rows=st.sampled_from(ROWS), layer=st.integers(0, LAYERS - 1), seed=st.integers(0, 99), data=st.data())
def test_live_rows_are_to_the_bit_those_of_the_whole_product(name, rows, layer, seed, data):
    """Any number of them: one that makes no sense is none, or all. What is behind them is not even read."""
    live = data.draw(st.one_of(st.integers(-2, rows + 2), st.sampled_from([-(2**31), 2**31 - 1])))
    x = drawn(rows, features_of(name), seed=seed)
    whole = multiply(name, x, layer)
    count = min(max(live, 0), rows)
    some = multiply(name, x, layer, np.int32(live))
    np.testing.assert_array_equal(some[:count], whole[:count])
    assert np.isfinite(some).all()
    if forms()[name][1]:
        assert not some[count:].any()
        x[count:] = np.nan
        np.testing.assert_array_equal(multiply(name, x, layer, np.int32(live)), some)


@pytest.mark.skipif(not integers.available(), reason="no kernel for this machine")
def test_an_encoder_in_int8_leaves_them_out_too(folder):
    kernels = load(folder(), quantize="int8").params["layers"]["up"]["kernel"]
    x = drawn(3, 7, 16)
    whole, some = (np.asarray(_times()(kernels, np.int32(1), x, live)) for live in (None, np.int32(9)))
    flat, want = some.reshape(21, -1), whole.reshape(21, -1)
    np.testing.assert_array_equal(flat[:9], want[:9])
    assert not flat[9:].any()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_derivatives_and_mapped_products_know_how_many(kind):
    x = drawn(5, FEATURES)
    kernels = forms()[kind][0] if kind in forms() else pytest.skip("no kernel for this machine")

    def total(x, live):
        return jnp.sum(jnp.square(apart.product(kernels, jnp.int32(1), x, live)))

    slopes = jax.jit(jax.grad(total))
    whole, some = (np.asarray(slopes(x, jnp.int32(live))) for live in (5, 3))
    np.testing.assert_array_equal(some[:3], whole[:3])
    assert whole[3:].any(axis=1).all()
    assert not some[3:].any()
    counts = jnp.array([2, 0, 9], jnp.int32)
    batch = jnp.stack([x, x + 1, x - 1])
    mapped = jax.vmap(lambda one, live: apart.product(kernels, jnp.int32(1), one, live))(batch, counts)
    for got, one, live in zip(mapped, batch, counts, strict=True):
        np.testing.assert_array_equal(got, multiply(kind, one, 1, live))


VARIANTS = {
    "plain": {},
    "int8": {"weights": "int8"},
    "qwen_head": {"qkv_bias": True, "qk_norm": True, "tied": False},
    "no_kernel": {"kernel": False},
}
COUNT, CHUNK, PAGES = 5, 3, 14
HELD = np.array([4, 0, 9, 2, 5], np.int32)
TABLE = np.arange(2, 2 + 2 * COUNT, dtype=np.int32).reshape(COUNT, 2)


@functools.cache
def _jitted(step):
    return jax.jit(step)


@functools.cache
def pool():
    """Pages with something finite where rows have tokens, and NaN everywhere else."""
    rng = np.random.default_rng(0)
    kv = {}
    for name, part in tiny().kv_shapes(pages=PAGES, page_size=8).items():
        kv[name] = np.full(part.shape, np.nan, np.float32)
        for row, length in enumerate(HELD):
            for at in range(length):
                place = (slice(None), TABLE[row, at // 8], slice(None))
                at %= 8
                where = (*place, slice(None), at) if name == "k" else (*place, at)
                kv[name][where] = rng.normal(size=kv[name][where].shape)
    return kv


def pages_of(kv, rows):
    return {name: np.asarray(part)[:, TABLE[rows].reshape(-1)] for name, part in kv.items()}


def step_of(model, name, lengths, *, junk):
    """Arguments of a step where rows have so many tokens, and what is not real is junk."""
    rng = np.random.default_rng(junk)
    ids = np.random.default_rng(1).integers(0, 259, (COUNT, CHUNK)).astype(np.int32)
    real = np.arange(CHUNK)[None] < lengths[:, None]
    ids = np.where(real, ids, rng.integers(-9, 10_000, ids.shape)).astype(np.int32)
    dead = lengths == 0
    inputs = {
        "page_table": np.where(dead[:, None], 0, TABLE),
        "context_lengths": np.where(dead, 0, HELD),
        "chunk_lengths": lengths,
    }
    if name != "mixed_step":
        return inputs | {"ids": ids}
    reader = 2
    further = np.zeros((2, 4), np.int32) + np.array([[-1], [2]], np.int32)
    tokens = rng.integers(-9, 10_000, 4).astype(np.int32)
    if lengths[reader] > 1:  # behind some padding
        count = lengths[reader] - 1
        further[:, 1 : 1 + count], tokens[1 : 1 + count] = (
            [[reader] * count, range(count)],
            ids[reader, :count],
        )
    own = ids[np.arange(COUNT), np.maximum(lengths - 1, 0)]
    return inputs | {"ids": own, "further_ids": tokens, "further": further, "reads": np.int32(reader)}


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("plain", "step"),
        ("plain", "mixed_step"),
        ("int8", "step"),
        ("int8", "verify_step"),
        ("qwen_head", "verify_step"),
        ("qwen_head", "mixed_step"),
        ("no_kernel", "step"),
    ],
)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_row_is_the_same_to_the_bit_among_rows_that_are_padding(variant, name, llama_of, data):
    """At the end, in the middle, everywhere; padding changes no page but the sink."""
    model = llama_of(**VARIANTS[variant])
    most = np.array([1, 1, CHUNK, 1, 1] if name == "mixed_step" else [CHUNK, 1, 2, CHUNK, 1], np.int32)
    last = data.draw(st.integers(0, COUNT))
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=COUNT, max_size=COUNT)))
    alive[last:] = False
    run, kv = _jitted(getattr(model, name)), pool()
    want, full = run(model.params, kv, **step_of(model, name, most, junk=0))
    lengths = np.where(alive, most, 0).astype(np.int32)
    got, after = run(model.params, kv, **step_of(model, name, lengths, junk=1))
    got, want = np.asarray(got), np.asarray(want)
    assert np.isfinite(got).all()
    for row in np.flatnonzero(alive):
        held = slice(most[row]) if name == "verify_step" else slice(None)
        np.testing.assert_array_equal(got[row][held], want[row][held])
    for part, there in pages_of(after, alive).items():
        np.testing.assert_array_equal(there, pages_of(full, alive)[part])
    for part, there in pages_of(after, ~alive).items():
        np.testing.assert_array_equal(there, pages_of(kv, ~alive)[part])
    for part in after.values():
        assert np.isnan(part[:, pages.NULL_PAGE]).all()
        assert np.isnan(part[:, 2 + 2 * COUNT :]).all()
