"""Decoders in bfloat16: what rounding may change, and what must stay as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import UnsupportedModel, load, native, tiny, turned
from servax.models.apart import product
from servax.models.random_model import random_params

VARIANTS = {
    "plain": {},
    "head": {"hidden_size": 42, "num_heads": 3, "num_kv_heads": 3, "tied": False},  # no powers of two
    "qwen2": {"qkv_bias": True, "num_kv_heads": 1},
}
BRIEF = np.dtype(jnp.bfloat16)


def as_brief(x):
    """What of float32 is left in bfloat16."""
    return x.astype(BRIEF).astype(np.float32)


# Each shape is compiled.
@settings(max_examples=6, deadline=None)
@given(st.sampled_from([(), (1,), (2,), (5,), (1, 1), (2, 3)]), st.integers(0, 99))
def test_products_are_those_of_the_rounded_numbers_and_of_no_other_row(lead, seed):
    rng = np.random.default_rng(seed)
    kernels = rng.standard_normal((3, 40, 24), np.float32)
    stacked = turned.turned({"layers": {"map": {"kernel": kernels}}}, BRIEF)["layers"]["map"]["kernel"]
    x = rng.standard_normal((*lead, 40), np.float32)
    run = jax.jit(product)
    got = np.asarray(run(stacked, np.int32(1), x))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, as_brief(x) @ as_brief(kernels[1]), rtol=1e-4, atol=1e-4)
    if x.ndim > 1:
        flat = x.reshape(-1, 40)
        flat[1:] = np.nan
        alone = np.asarray(run(stacked, np.int32(1), flat.reshape(x.shape))).reshape(-1, 24)
        np.testing.assert_array_equal(alone[0], got.reshape(-1, 24)[0])
        assert np.isnan(alone[1:]).all()


def test_products_of_sizes_that_are_not_known_yet():
    batch, length = jax.export.symbolic_shape("b, l")
    x = jax.ShapeDtypeStruct((batch, length, 8), jnp.float32)
    kernels = turned.Turned((jnp.zeros((4, 8), jnp.bfloat16),))
    made = jax.eval_shape(lambda x: product(kernels, jnp.int32(0), x), x)
    assert (made.shape, made.dtype) == ((batch, length, 4), jnp.float32)


def texts_of(model, length=20):
    ids = np.random.default_rng(1).integers(3, model.vocab_size, (3, length), np.int32)
    return {"ids": ids, "lengths": np.array([length, 7, 1], np.int32)}


@functools.cache
def answers(variant, weights, kernel=True):
    """Without `kernel`, what a machine serves that has none for panels."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(native, "available", lambda: False)
        model = tiny(weights=weights, **VARIANTS[variant])
    return model, np.asarray(jax.jit(model.forward)(model.params, **texts_of(model)))


@pytest.mark.parametrize(("variant", "kernel"), [*((one, True) for one in VARIANTS), ("head", False)])
def test_bfloat16_is_near_float32_and_takes_half(variant, kernel):
    (model, want), (small, got) = (answers(variant, one, kernel) for one in ("float32", "bfloat16"))
    assert 0 < np.std(got - want) < 0.03 * np.std(want)
    sizes = [sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(one.params)) for one in (small, model)]
    assert sizes[0] < 0.52 * sizes[1]
    matrices = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(small.params) if leaf.size > 1000}
    assert matrices == {BRIEF}
    assert small.config["weights"] == "bfloat16"


def test_what_is_no_matrix_stays_float32():
    params = tiny(weights="bfloat16", qkv_bias=True, qk_norm=True).params
    paths = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in paths:
        name = jax.tree_util.keystr(path)
        assert (leaf.dtype == BRIEF) == ("kernel" in name or name.startswith(("['word']", "['head']"))), name


def run_steps(model, params, ids, rows, kv_dtype, junk=0.0):
    """Logits after each token of `ids` in the first of `rows` rows, 8 tokens and then one at a time."""
    spec = model.kv_shapes(pages=3 * rows + 2, page_size=8, dtype=kv_dtype)
    kv = {name: jnp.full(part.shape, junk, part.dtype) for name, part in spec.items()}
    table = 2 + np.arange(3 * rows, dtype=np.int32).reshape(rows, 3)
    step, out = jax.jit(model.step), []
    for begin, end in ((0, 8), *((at, at + 1) for at in range(8, 14))):
        chunk = np.full((rows, end - begin), 99, np.int32)
        chunk[0] = ids[begin:end]
        sizes = {
            "context_lengths": np.where(np.arange(rows) == 0, begin, 0).astype(np.int32),
            "chunk_lengths": np.where(np.arange(rows) == 0, end - begin, 0).astype(np.int32),
        }
        logits, kv = step(params, kv, ids=chunk, page_table=table, **sizes)
        out.append(np.asarray(logits[0]))
    return np.stack(out)


def test_a_step_over_pages_equals_whole_sequences_alone_and_in_a_batch():
    """Where a number is rounded to another eighth bit, 32 features tell."""
    model, want = answers("plain", "bfloat16")
    ids, want = texts_of(model)["ids"][0], want[0, 7:14]
    alone = run_steps(model, model.params, ids, 1, jnp.float16)
    beside = run_steps(model, model.params, ids, 4, jnp.float16)
    junk = run_steps(model, model.params, ids, 4, jnp.float16, junk=np.nan)
    np.testing.assert_array_equal(beside, junk)
    for got in (alone, beside):
        np.testing.assert_allclose(got, want, atol=0.15 * float(np.std(want)))


def test_keys_and_values_beside_bfloat16_weights_are_held_in_half_the_bytes():
    small = tiny(weights="bfloat16")
    assert {part.dtype for part in small.init_kv(pages=3, page_size=4).values()} == {jnp.dtype(jnp.float16)}
    assert 2 * small.kv_bytes_per_token == tiny().kv_bytes_per_token


def test_params_that_were_given_stay_as_they_were():
    params = random_params(tiny().step.args[0], 0)
    before = jax.tree.map(np.copy, params)
    turned.turned(params, BRIEF)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_dtypes_that_are_not_computed_are_refused_before_anything_is_read():
    with pytest.raises(UnsupportedModel, match="float32 or bfloat16 or left out, got 'float16': choose one"):
        load("no such model", dtype="float16")
    with pytest.raises(UnsupportedModel, match="got quantize='int8' and dtype='bfloat16': leave one"):
        load("no such model", dtype="bfloat16", quantize="int8")
