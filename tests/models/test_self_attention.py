"""The kernel for attention of rows of texts, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models.native import self_attention, tile

pytestmark = pytest.mark.skipif(not self_attention.available(), reason="no kernel for this machine")


def reference(qkv, texts, heads):
    batch, length, _ = qkv.shape
    q, k, v = np.moveaxis(qkv.astype(np.float64).reshape(batch, length, 3, heads, -1), 2, 0)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(texts[:, None, :, None] == texts[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    return mixed.reshape(batch, length, -1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_equals_numpy_whatever_the_texts(batch, length, heads, vectors, runs, seed):
    rng = np.random.default_rng(seed)
    size = vectors * tile().lanes
    qkv = rng.normal(size=(batch, length, 3 * heads * size)).astype(np.float32)
    texts = rng.integers(0, 4, (batch, length)).astype(np.int32)
    if runs:  # as a packed row holds them
        texts = np.sort(texts, axis=1)[:, ::-1].copy()
    got = self_attention.attend(jnp.asarray(qkv), jnp.asarray(texts), heads=heads)
    np.testing.assert_allclose(got, reference(qkv, texts, heads), rtol=2e-5, atol=2e-6)


def test_scores_of_any_size_give_weights():
    lanes = tile().lanes
    qkv = np.random.default_rng(0).normal(size=(1, 40, 3 * lanes)).astype(np.float32)
    qkv[:, :, : 2 * lanes] *= 30.0
    texts = np.ones((1, 40), np.int32)
    got = self_attention.attend(jnp.asarray(qkv), jnp.asarray(texts), heads=1)
    np.testing.assert_allclose(got, reference(qkv, texts, 1), rtol=2e-5, atol=2e-5)


def test_a_row_depends_on_no_other_row_to_the_bit():
    rng = np.random.default_rng(1)
    qkv = jnp.asarray(rng.normal(size=(5, 70, 6 * tile().lanes)), jnp.float32)
    texts = jnp.asarray(rng.integers(0, 3, (5, 70)), jnp.int32)
    whole = self_attention.attend(qkv, texts, heads=2)
    for row in range(5):
        alone = self_attention.attend(qkv[row : row + 1], texts[row : row + 1], heads=2)
        np.testing.assert_array_equal(alone[0], whole[row])


def test_what_is_not_finite_stays_in_its_row():
    rng = np.random.default_rng(2)
    qkv = rng.normal(size=(2, 20, 3 * tile().lanes)).astype(np.float32)
    texts = jnp.ones((2, 20), jnp.int32)
    sound = self_attention.attend(jnp.asarray(qkv), texts, heads=1)
    qkv[0, 3] = np.nan
    spoiled = self_attention.attend(jnp.asarray(qkv), texts, heads=1)
    assert np.isnan(spoiled[0]).all()
    np.testing.assert_array_equal(spoiled[1], sound[1])


def test_it_can_be_differentiated_and_mapped():
    rng = np.random.default_rng(3)
    lanes = tile().lanes
    qkv = jnp.asarray(rng.normal(size=(2, 9, 3 * lanes)), jnp.float32)
    texts = jnp.asarray(rng.integers(0, 2, (2, 9)), jnp.int32)

    def total(x):
        return jnp.sum(jnp.square(self_attention.attend(x, texts, heads=1)))

    plain = jax.grad(lambda x: jnp.sum(jnp.square(self_attention._reference(1, x, texts))))(qkv)
    np.testing.assert_allclose(jax.grad(total)(qkv), plain, rtol=1e-4, atol=1e-5)
    mapped = jax.vmap(lambda x, t: self_attention.attend(x, t, heads=1))(qkv[:, None], texts[:, None])
    np.testing.assert_allclose(mapped[:, 0], self_attention.attend(qkv, texts, heads=1), rtol=1e-6)
