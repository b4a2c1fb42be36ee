"""Attention to a paged pool by the kernel: what it gives, what it reads, and when it is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import native, paged, pages
from servax.models.errors import KernelUnavailable
from servax.models.native import paged_attention

pytestmark = pytest.mark.skipif(not paged_attention.available("float32"), reason="no kernel for this machine")
LAYERS, LAYER = 3, 1
SPAN = 256


@jax.jit
def attend(keys, values, *others):
    assert paged_attention.fits(values)
    return paged_attention.attend(keys, values, *others)


def pool_of(rng, dtype, *, pages, kv, head, size):
    front = (LAYERS, pages, kv)
    return {
        "k": np.full((*front, head, size), np.nan, dtype),
        "v": np.full((*front, size, head), np.nan, dtype),
    }


def drawn(seed, dtype, lengths, *, kv=2, queries=3, head=64, size=64, width=None, scale=1.0):
    """Arguments of `attend`: NaN wherever no row's tokens are, pages shuffled."""
    rng = np.random.default_rng(seed)
    rows, width = len(lengths), width or max(1, -(-max(lengths) // size))
    pages = 2 + rows * width
    pool = pool_of(rng, dtype, pages=pages, kv=kv, head=head, size=size)
    table = (2 + rng.permutation(rows * width)).reshape(rows, width).astype(np.int32)
    for row, length in enumerate(lengths):
        for place in range(length):
            page, at = table[row, place // size], place % size
            pool["k"][LAYER, page, :, :, at] = rng.normal(size=(kv, head))
            pool["v"][LAYER, page, :, at] = rng.normal(size=(kv, head))
    q = (scale * rng.normal(size=(rows, kv, queries, head)) / np.sqrt(head)).astype(np.float32)
    state = (
        rng.normal(size=q.shape[:3]).astype(np.float32),
        rng.uniform(1, 2, q.shape[:3]).astype(np.float32),
        rng.normal(size=q.shape).astype(np.float32),
    )
    return pool["k"], pool["v"], table, np.array(lengths, np.int32), np.int32(LAYER), q, state


def reference(k, v, table, lengths, layer, q, state):
    """In float64, a row at a time."""
    highest, total, mixed = (part.astype(np.float64) for part in state)
    out = np.empty(q.shape)
    for row, length in enumerate(lengths):
        keys = np.concatenate([k[layer, page] for page in table[row]], axis=2)[:, :, :length]
        values = np.concatenate([v[layer, page] for page in table[row]], axis=1)[:, :length]
        scores = q[row].astype(np.float64) @ keys.astype(np.float64)
        top = np.maximum(highest[row], scores.max(-1, initial=-np.inf))
        weights, own = np.exp(scores - top[..., None]), np.exp(highest[row] - top)
        sums = total[row] * own + weights.sum(-1)
        out[row] = (mixed[row] * own[..., None] + weights @ values.astype(np.float64)) / sums[..., None]
    return out


LENGTHS = st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 63, 64, 65, 128, SPAN, SPAN + 1, 2 * SPAN]))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    kv=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 3, 4, 5, 7, 49]),
    head=st.sampled_from([16, 64, 80]),
    size=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from([np.float32, np.float16]),
    scale=st.sampled_from([1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_it_gives_what_float64_gives(lengths, kv, queries, head, size, dtype, scale, seed):
    """Lengths at and off the borders of pages and spans; everything that is not a row's own is NaN."""
    case = drawn(seed, dtype, lengths, kv=kv, queries=queries, head=head, size=size, scale=scale)
    got, want = np.asarray(attend(*case)), reference(*case)
    # A score of 100 is off by 1e-5 in float32, and so is its weight.
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * max(1.0, scale))


def test_a_row_without_a_past_keeps_its_own_sums_to_the_bit():
    case = drawn(0, np.float32, [0, 70, 0])
    got, (_, total, mixed) = np.asarray(attend(*case)), case[-1]
    np.testing.assert_array_equal(got[::2], (mixed / total[..., None])[::2])


@settings(max_examples=8, deadline=None)
@given(length=LENGTHS, beside=st.lists(LENGTHS, max_size=5), more=st.integers(0, 9), seed=st.integers(0, 9))
def test_P11_G7_neighbours_and_the_width_of_the_table_change_no_bit(length, beside, more, seed):
    alone = drawn(seed, np.float32, [length])
    k, v, table, lengths, layer, q, state = drawn(seed + 1, np.float32, [*beside, length], queries=3)
    shift = k.shape[1]
    row = np.full((1, table.shape[1] + alone[2].shape[1] + more), pages.NULL_PAGE, np.int32)
    tables = np.repeat(row, len(lengths), axis=0)
    tables[:, : table.shape[1]] = table
    tables[-1] = pages.NULL_PAGE
    tables[-1, : alone[2].shape[1]] = alone[2][0] + shift
    together = (
        np.concatenate([k, alone[0]], axis=1),
        np.concatenate([v, alone[1]], axis=1),
        tables,
        lengths,
        layer,
        np.concatenate([q[:-1], alone[5]]),
        tuple(np.concatenate([one[:-1], own]) for one, own in zip(state, alone[6], strict=True)),
    )
    np.testing.assert_array_equal(np.asarray(attend(*together))[-1], np.asarray(attend(*alone))[0])


@pytest.mark.parametrize("queries", [47, 150])
def test_queries_beside_one_another_change_no_bit(queries):
    """Those of a chunk are taken a few at a time; a chunk of many has each row's tokens in one span."""
    k, v, table, lengths, layer, q, state = drawn(3, np.float32, [300, 90], queries=queries)
    every = np.asarray(attend(k, v, table, lengths, layer, q, state))
    few, many = (slice(0, 1), slice(5, 12), slice(40, 47)), (slice(1, 50), slice(60, 149))
    for some in few if queries < 48 else many:
        part = attend(k, v, table, lengths, layer, q[:, :, some], tuple(one[:, :, some] for one in state))
        np.testing.assert_array_equal(part, every[:, :, some])


def test_G12_what_is_not_finite_in_a_past_stays_in_its_row():
    for name in (0, 1):
        case = drawn(4, np.float16, [70, 130, 20])
        case[name][LAYER, case[2][1, 1], 0, 3, 3] = np.nan
        got = np.asarray(attend(*case))
        assert np.isfinite(got[::2]).all()
        assert np.isnan(got[1, 0]).any(-1).all()  # every query of the kv head
        assert np.isfinite(got[1, 1]).all()


def test_scores_far_apart_leave_the_highest_only():
    k, v, table, lengths, layer, q, state = drawn(5, np.float32, [130], kv=1, queries=1)
    k[LAYER, table[0, :2]] = -1e4
    k[LAYER, table[0, 1], :, :, 7] = 1e4
    got = attend(k, v, table, lengths, layer, np.ones_like(q), state)
    np.testing.assert_array_equal(np.asarray(got)[0, 0, 0], v[LAYER, table[0, 1], 0, 7])


def test_pages_layers_and_lengths_outside_are_clipped():
    k, v, table, lengths, _, q, state = drawn(6, np.float32, [128], width=2)
    k[-1], v[-1] = k[LAYER], v[LAYER]
    table[0, 1] = k.shape[1] - 1
    k[-1, -1], v[-1, -1] = 0.5, 0.25
    k[-1, table[0, 0]], v[-1, table[0, 0]] = 0.25, 0.5
    want = reference(k, v, table, lengths, LAYERS - 1, q, state)
    table[0, 1] = 10**6
    got = attend(k, v, table, np.array([10**6], np.int32), np.int32(99), q, state)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def both(monkeypatch, function, *case):
    """With the kernel and without: traced anew each time."""
    programs = []
    for there in (True, False):
        monkeypatch.setattr(native, "available", lambda there=there: there)
        programs.append(jax.jit(lambda *case: function(*case)).lower(*case).compile())
    assert ["servax_paged_attention" in one.as_text() for one in programs] == [True, False]
    got, want = (one(*case) for one in programs)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "chunk"), [(jnp.float32, 1), (jnp.float16, 5)])
def test_chunks_read_their_past_as_without_the_kernel(monkeypatch, dtype, chunk):
    k, v, table, lengths, layer, *_ = drawn(7, dtype, [0, 100, 64], head=16, size=16)
    past = pages.Past({"k": jnp.asarray(k), "v": jnp.asarray(v)}, jnp.asarray(table), jnp.asarray(lengths))
    rng = np.random.default_rng(8)
    q = jnp.asarray(rng.normal(size=(3, 6, chunk, 16)), jnp.float32)
    own = [jnp.asarray(rng.normal(size=(3, 2, chunk, 16)), jnp.float32) for _ in "kv"]
    keep = jnp.asarray(np.tri(chunk, dtype=bool)[None].repeat(3, 0))
    assert paged_attention.fits(past.cache["v"])
    both(monkeypatch, paged.attend, past, layer, q, *own, keep)


@pytest.mark.parametrize("some", [True, False])
def test_rows_and_further_tokens_read_their_past_as_without_the_kernel(monkeypatch, some):
    k, v, table, lengths, layer, *_ = drawn(9, np.float32, [0, 100, 64], head=16, size=16)
    past = pages.Past({"k": jnp.asarray(k), "v": jnp.asarray(v)}, jnp.asarray(table), jnp.asarray(lengths))
    rng = np.random.default_rng(10)
    q = jnp.asarray(rng.normal(size=(8, 6, 1, 16)), jnp.float32)
    own = [jnp.asarray(rng.normal(size=(8, 2, 1, 16)), jnp.float32) for _ in "kv"]
    more = paged.More(jnp.int32(1), jnp.array([True, False, True, True, False]) & some)
    both(monkeypatch, paged.attend_mixed, past, layer, q, *own, jnp.eye(8, dtype=bool), more)


def test_pools_of_other_shapes_and_types_are_read_without_it():
    def values(size, head, dtype):
        return jax.ShapeDtypeStruct((1, 3, 1, size, head), dtype)

    assert paged_attention.fits(values(64, 64, jnp.float32))
    for other in (values(3, 64, jnp.float32), values(64, 6, jnp.float32), values(64, 64, jnp.bfloat16)):
        assert not paged_attention.fits(other)


def test_a_machine_without_the_kernel_is_told_apart(monkeypatch):
    def refuse():
        raise KernelUnavailable("none")

    monkeypatch.setattr(paged_attention, "tile", refuse)
    assert not paged_attention._available.__wrapped__("float32")
