"""The kernel for attention of rows of texts, against NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models.native import self_attention, tile

pytestmark = pytest.mark.skipif(not self_attention.available(), reason="no kernel for this machine")


def reference(qkv, texts, starts, heads):
    """Zeros where no row is."""
    tokens, width = qkv.shape
    mixed = np.zeros((tokens, width // 3))
    for begin, end in itertools.pairwise(starts):
        if begin < end:
            row = qkv[begin:end].astype(np.float64).reshape(end - begin, 3, heads, -1)
            q, k, v = np.moveaxis(row, 1, 0)
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            own = texts[begin:end, None] == texts[None, begin:end]
            scores = np.where(own, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            row = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
            mixed[begin:end] = row.reshape(end - begin, -1)
    return mixed


def attend(qkv, texts, starts, heads):
    return np.asarray(self_attention.attend(*map(jnp.asarray, (qkv, texts, starts)), heads=heads))


def starts_of(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def drawn(lengths, *, heads=1, behind=0, vectors=1, seed=0):
    """Rows of those lengths and places behind the last, which hold what would be seen if it were read."""
    rng, starts = np.random.default_rng(seed), starts_of(lengths)
    tokens = int(starts[-1]) + behind
    qkv = rng.normal(size=(tokens, 3 * heads * vectors * tile().lanes)).astype(np.float32)
    qkv[starts[-1] :] = np.nan
    return qkv, rng.integers(0, 4, tokens).astype(np.int32), starts


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 150)), max_size=5),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_equals_numpy_whatever_the_rows_and_their_texts(
    lengths, behind, heads, vectors, runs, seed
):
    qkv, texts, starts = drawn(lengths, heads=heads, behind=behind, vectors=vectors, seed=seed)
    if runs:  # as a packed row holds them
        for begin, end in itertools.pairwise(starts):
            texts[begin:end] = np.sort(texts[begin:end])[::-1]
    got = attend(qkv, texts, starts, heads)
    np.testing.assert_allclose(got, reference(qkv, texts, starts, heads), rtol=2e-5, atol=2e-6)
    assert not got[starts[-1] :].any()


def test_scores_of_any_size_give_weights():
    size = 16  # whole vectors on every processor, so that it is the same numbers everywhere
    qkv = np.random.default_rng(0).normal(size=(40, 3 * size)).astype(np.float32)
    qkv[:, : 2 * size] *= 30.0
    texts, starts = np.ones(40, np.int32), starts_of([40])
    got = attend(qkv, texts, starts, 1)
    np.testing.assert_allclose(got, reference(qkv, texts, starts, 1), rtol=2e-5, atol=2e-5)


def test_a_text_whose_scores_are_all_minus_infinity_reads_no_other_text():
    lanes = tile().lanes
    qkv, _, starts = drawn([9])
    texts = np.repeat([1, 2], [4, 5]).astype(np.int32)
    qkv[:, :lanes] = np.abs(qkv[:, :lanes])
    qkv[:4, lanes : 2 * lanes] = -np.inf
    got = attend(qkv, texts, starts, 1)
    assert np.isnan(got[:4]).all()
    # The values of such a text are finite, so that weights of exactly 0 keep them out.
    np.testing.assert_allclose(got[4:], attend(qkv[4:], texts[4:], starts_of([5]), 1), rtol=1e-6)


def test_a_row_depends_on_no_other_row_to_the_bit_wherever_it_lies():
    lengths = (70, 1, 33, 0, 64, 5)
    qkv, texts, starts = drawn(lengths, heads=2)
    whole = attend(qkv, texts, starts, 2)
    rows = [slice(begin, end) for begin, end in itertools.pairwise(starts)]
    for row in rows:
        alone = attend(qkv[row], texts[row], starts_of([row.stop - row.start]), 2)
        np.testing.assert_array_equal(alone, whole[row])
    around = rows[::-1]
    moved = attend(*(np.concatenate([part[row] for row in around]) for part in (qkv, texts)),
                   starts_of(lengths[::-1]), 2)  # fmt: skip
    np.testing.assert_array_equal(moved, np.concatenate([whole[row] for row in around]))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_not_finite_stays_in_its_row(part, wrong):
    """Keys of a longer row may still stand behind those of the next one, where they count for nothing."""
    qkv, _, starts = drawn([70, 3, 40, 33, 5, 1])
    texts, lanes = np.ones(len(qkv), np.int32), tile().lanes
    sound = attend(qkv, texts, starts, 1)
    for row in (0, 3):
        qkv[starts[row] : starts[row + 1], part * lanes : (part + 1) * lanes] = wrong
    spoiled = attend(qkv, texts, starts, 1)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        if row in (0, 3):
            assert not np.isfinite(spoiled[begin:end]).any()
        else:
            np.testing.assert_array_equal(spoiled[begin:end], sound[begin:end])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-5, 45), st.sampled_from([-(2**31), 2**31 - 1])), min_size=7, max_size=7)
)
def test_starts_that_make_no_sense_stay_within_the_tokens(given_starts):
    """They are brought to the nearest token; a row that ends before it begins is empty."""
    qkv, texts, _ = drawn([40])
    starts = np.array(given_starts, np.int32)
    before, got, after = (np.asarray(one) for one in _between()(qkv, texts, starts))
    np.testing.assert_array_equal(before, qkv + 1)
    np.testing.assert_array_equal(after, qkv + 2)
    within = np.clip(starts.astype(np.int64), 0, 40)
    covered = np.zeros(40, int)
    for begin, end in itertools.pairwise(within):
        covered[begin:end] += 1
    want, once = reference(qkv, texts, within, 1), covered == 1
    np.testing.assert_allclose(got[once], want[once], rtol=2e-5, atol=2e-6)
    behind = (covered == 0) & (np.arange(40) >= within[-1])
    assert not got[behind].any()


@functools.cache
def _between():
    """The call with buffers before it and behind it."""

    def run(qkv, texts, starts):
        return qkv + 1, self_attention.attend(qkv, texts, starts, heads=1), qkv + 2

    return jax.jit(run)


def test_it_can_be_differentiated_and_mapped():
    lengths = ([5, 4], [0, 7], [9, 0])
    cases = [drawn(some, behind=10 - sum(some), seed=seed) for seed, some in enumerate(lengths)]
    qkv, texts, starts = (np.stack(part) for part in zip(*cases, strict=True))
    qkv = np.nan_to_num(qkv)

    def total(how, x):
        return jnp.sum(jnp.square(how(x, texts[0], starts[0])))

    kernel = functools.partial(self_attention.attend, heads=1)
    reference = functools.partial(self_attention._reference, 1, len(qkv[0]))
    plain = jax.grad(functools.partial(total, reference))(qkv[0])
    np.testing.assert_allclose(
        jax.grad(functools.partial(total, kernel))(qkv[0]), plain, rtol=1e-4, atol=1e-5
    )
    assert not plain[starts[0, -1] :].any()
    mapped = jax.vmap(kernel)(qkv, texts, starts)
    for one, *case in zip(mapped, qkv, texts, starts, strict=True):
        np.testing.assert_array_equal(one, attend(*case, 1))


def test_shapes_may_be_symbols():
    tokens, bounds = jax.export.symbolic_shape("tokens, bounds")
    width = tile().lanes
    like = jax.ShapeDtypeStruct((tokens, 3 * width), jnp.float32)
    texts, starts = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (tokens, bounds))
    kernel = functools.partial(self_attention.attend, heads=1)
    assert jax.eval_shape(kernel, like, texts, starts).shape == (tokens, width)
