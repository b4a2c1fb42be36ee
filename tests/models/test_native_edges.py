"""Kernels at the ends of their operands: nothing is read past them, whatever the sizes and numbers."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.models import native
from servax.models.errors import InputError
from servax.models.native import paged_attention, self_attention

THERE = native.available() and self_attention.available() and paged_attention.available("float32")
pytestmark = pytest.mark.skipif(not THERE, reason="no kernels for this machine")


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pool(*, rows=2, kv=1, queries=3, head=64, size=64, width=2, lengths=(5, 64)):
    """Arguments of `paged_attention.attend`."""
    pages = rows * width + 1
    table = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    own = (np.zeros((rows, kv, queries), np.float32), np.ones((rows, kv, queries), np.float32))
    q, mixed = drawn(2, rows, kv, queries, head)
    keys, values = drawn(1, pages, kv, head, size), drawn(1, pages, kv, size, head)
    return [keys, values, table, np.array(lengths, np.int32), np.int32(0), q, (*own, mixed)]


@pytest.mark.parametrize(("rows", "panels"), [(0, 1), (3, 0), (0, 0)])
def test_products_of_nothing_are_empty(rows, panels):
    features = panels * native.tile().width
    got = native.product(
        drawn(rows, 5), drawn(1, panels, 5, native.tile().width), np.int32(0), features=features
    )
    assert got.shape == (rows, features)


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_activations_of_other_types_are_not_read_as_float32(kind):
    width = native.tile().width
    x, panels = jnp.round(4 * drawn(70, 9)).astype(kind), drawn(2, 2, 9, width)
    want = native.product(x.astype(jnp.float32), panels, np.int32(1), features=width + 1)
    got = native.product(x, panels, np.int32(1), features=width + 1)
    np.testing.assert_array_equal(got, want)


def test_products_whose_sizes_differ_are_refused():
    width = native.tile().width
    cases = [
        (drawn(3, 8), (1, 1, 9, width), width),  # fewer features than the panels have
        (drawn(3, 0), (1, 1, 0, width), width),
        (drawn(3, 8), (0, 1, 8, width), width),
        (drawn(3, 8), (1, 2, 8, width), width),  # the last panel would be written before its row
        (drawn(3, 8), (1, 2, 8, width), 2 * width + 1),
        (drawn(3, 8), (1, 1, 8, 2 * width), width),  # laid out for another machine
    ]
    for x, shape, features in cases:
        with pytest.raises(InputError, match="x must be"):
            native.product(x, np.zeros(shape, np.float32), np.int32(0), features=features)
    pairs = jnp.zeros((1, 1, 4, width, 2), jnp.bfloat16)
    assert native.product(drawn(3, 7), pairs, np.int32(0), features=width).shape == (3, width)
    with pytest.raises(InputError, match="x must be"):
        native.product(drawn(3, 6), pairs, np.int32(0), features=width)


def test_rows_of_texts_of_other_types_and_sizes():
    lanes = native.tile().lanes
    qkv, texts, starts = drawn(42, 3 * lanes), np.ones(42, np.int32), np.int32([0, 21, 42])
    want = self_attention.attend(qkv.astype(np.float16).astype(np.float32), texts, starts, heads=1)
    brief = qkv.astype(np.float16), texts.astype(np.int8), starts.astype(np.int16)
    np.testing.assert_array_equal(self_attention.attend(*brief, heads=1), want)
    for none in ([0], [0, 0], [0, 0, 0], [0, 5]):
        empty = self_attention.attend(qkv[:0], texts[:0], np.int32(none), heads=1)
        assert empty.shape == (0, lanes)
    assert not self_attention.attend(qkv, texts, np.int32([0]), heads=1).any()
    assert not self_attention.fits(0)
    for some, few, bounds, heads in (
        (qkv, texts[:1], starts, 1),
        (qkv, texts, starts, 2),
        (qkv[..., :-3], texts, starts, 1),
        (qkv, texts, starts, 0),
        (qkv.reshape(2, 21, -1), texts.reshape(2, 21), starts, 1),
        (qkv[0], texts, starts, 1),
        (qkv, texts, starts[None], 1),
        (qkv, texts, starts[:0], 1),
        (qkv, texts, np.int32(42), 1),
    ):
        with pytest.raises(InputError, match="qkv must be"):
            self_attention.attend(some, few, bounds, heads=heads)


def test_rows_whose_table_names_no_page_keep_their_own_sums():
    case = pool(width=0, lengths=(9, 0))
    np.testing.assert_array_equal(paged_attention.attend(*case), case[6][2])
    assert paged_attention.attend(*pool(rows=0, lengths=())).shape == (0, 1, 3, 64)


def test_pools_whose_sizes_differ_are_refused():
    def less(place, cut):
        case = pool()
        case[place] = cut(case[place])
        return case

    wrong = [
        less(0, lambda k: k[:, :-1]),
        less(0, lambda k: k.astype(np.float16)),
        less(2, lambda table: table[:1]),
        less(3, lambda lengths: lengths[:1]),
        less(5, lambda q: q[..., :-16]),
        less(6, lambda state: (state[0][:1], *state[1:])),
        pool(size=3),
        pool(size=2048),
    ]
    for case in wrong:
        with pytest.raises(InputError, match="must be of the same rows"):
            paged_attention.attend(*case)
    for shape in ((1, 2, 1, 0, 64), (1, 2, 1, 64, 0), (1, 0, 1, 64, 64), (0, 2, 1, 64, 64)):
        assert not paged_attention.fits(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("lengths", [(1, 64), (64, 65)])
def test_scores_that_are_all_minus_infinity_weigh_nothing(lengths):
    """Past float32, as keys of float16 past 65504 give them; the row's own chunk is still there."""
    case = pool(lengths=lengths)
    case[0][:], case[5] = -1e30, np.full_like(case[5], 1e20)
    np.testing.assert_array_equal(paged_attention.attend(*case), case[6][2])


def test_calls_at_once_change_no_bit():
    """Helpers of one call may still be on their way when the next ones begin."""
    width, lanes = native.tile().width, native.tile().lanes
    product = jax.jit(lambda x, panels: native.product(x, panels, jnp.int32(0), features=5 * width - 7))
    rows = jax.jit(lambda *operands: self_attention.attend(*operands, heads=2))
    work = [
        (product, (drawn(130, 200), drawn(1, 5, 200, width))),
        (rows, (drawn(300, 6 * lanes), np.repeat(np.int32([1, 2] * 3), 50), np.int32([0, 120, 150, 290]))),
        (jax.jit(paged_attention.attend), tuple(pool(queries=60, width=8, lengths=(500, 301)))),
    ]
    wanted = [np.asarray(call(*args)) for call, args in work]
    same = []

    def again(call, args, want):
        same.append(all(np.array_equal(call(*args), want) for _ in range(30)))

    threads = [
        threading.Thread(target=again, args=(*one, want))
        for one, want in zip(work, wanted, strict=True)
        for _ in range(2)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert same == [True] * len(threads)
