"""Padding items into the host buffers of a bucket."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket
from servax.jit_cache import Signature, Staging, check_item


class Buffers(Staging):
    """Staging that takes what a caller sends."""

    def __init__(self, declarations, *sizes):
        self.declared = Signature.parse(declarations)
        super().__init__(self.declared, Bucket(("batch", *self.declared.axes), sizes))

    def take(self, *items):
        limits = dict.fromkeys(self.declared.axes, 1000)
        checked = [check_item(self.declared, item, limits) for item in items]
        return self.fill([item for item, _ in checked], [sizes for _, sizes in checked])


def test_P1_the_pad_value_is_declared_and_the_mask_is_zero_on_padding(harness):
    """And each answer equals that of the item alone, whatever runs beside it."""
    inputs = {"ids": "int32[length] = 5", "mask": "mask[length]"}
    got = Buffers(inputs, 2, 32).take({"ids": [5, 6, 7]}, {"ids": range(1, 19)})
    np.testing.assert_array_equal(got["ids"][0], [5, 6, 7] + [5] * 29)
    np.testing.assert_array_equal(got["mask"].sum(1), [3, 18])
    assert got["mask"][0, :3].all()

    def mean(table, ids, mask):
        weights = mask.astype(np.float32)[..., None]
        return (table[ids] * weights).sum(1) / weights.sum(1)

    table = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    model = harness(mean, table, inputs=inputs, limits={"length": 32}, scheme=[4, 32])
    (alone,) = model.run((1, 4), {"ids": [5, 6, 7]})
    beside, mate = model.run((2, 32), {"ids": [5, 6, 7]}, {"ids": list(range(1, 19))})
    np.testing.assert_allclose(alone, beside, atol=1e-5)
    np.testing.assert_allclose(mate, table[1:19].mean(0), atol=1e-5)


def test_P1_a_clients_own_mask_is_an_input_like_any_other():
    buffers = Buffers({"ids": "int32[length]", "attention": "bool[length]", "mask": "mask[length]"}, 2, 8)
    got = buffers.take({"ids": [5, 6, 7], "attention": [1, 0, 1]})
    np.testing.assert_array_equal(got["attention"][0], [1, 0, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(got["mask"][0], [1, 1, 1, 0, 0, 0, 0, 0])
    assert not got["attention"][1].any()


def test_P2_nothing_lives_into_the_next_run():
    inputs = {"x": "float32[length]", "m": "mask[length]", "n": "lengths[length]", "p": "positions[length]"}
    buffers = Buffers(inputs, 8, 16)
    draw = np.random.default_rng(0)
    for _ in range(200):
        items = [
            {"x": draw.normal(size=draw.integers(1, 17)).astype(np.float32)} for _ in range(draw.integers(9))
        ]
        got = buffers.take(*items)
        lengths = [len(item["x"]) for item in items] + [0] * (8 - len(items))
        np.testing.assert_array_equal(got["n"], lengths)
        np.testing.assert_array_equal(got["m"], np.arange(16) < np.array(lengths)[:, None])
        np.testing.assert_array_equal(got["p"], np.tile(np.arange(16), (8, 1)))
        for row, item in enumerate(items):
            np.testing.assert_array_equal(got["x"][row, : lengths[row]], item["x"])
        assert not got["x"][~got["m"]].any()


DTYPES = {
    "bool": ["1", "0"],
    "uint8": ["255"],
    "int8": ["-128"],
    "int32": ["-1"],
    "float16": ["-2.5", "nan", "inf"],
    "float32": ["0.1", "-inf"],
    "complex64": ["1.5"],
    "bfloat16": ["3.5", "nan"],
    "float8_e4m3fn": ["448", "nan"],
    "float8_e5m2": ["-inf"],
    "int4": ["-8"],
}


@pytest.mark.parametrize(("kind", "pad"), [(kind, pad) for kind, pads in DTYPES.items() for pad in pads])
def test_every_dtype_is_padded_with_its_own_value(kind, pad):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    buffers = Buffers({"x": f"{kind}[length] = {pad}"}, 3, 4)
    got = buffers.take({"x": np.ones(2, dtype)}, {"x": np.ones(4, dtype)})["x"]
    assert got.dtype == dtype
    wanted = np.full((3, 4), float(pad)).astype(dtype)
    wanted[0, :2] = 1
    wanted[1] = 1
    np.testing.assert_array_equal(got.astype(np.complex64), wanted.astype(np.complex64))


def test_a_mask_over_two_axes():
    inputs = {"image": "uint8[height, width, 3] = 9", "mask": "mask[height, width]", "wide": "mask[width]"}
    got = Buffers(inputs, 2, 4, 6).take({"image": np.ones((3, 2, 3), np.uint8)})
    wanted = np.zeros((2, 4, 6), bool)
    wanted[0, :3, :2] = True
    np.testing.assert_array_equal(got["mask"], wanted)
    np.testing.assert_array_equal(got["image"], np.where(wanted[..., None], [1, 1, 1], 9))
    np.testing.assert_array_equal(got["wide"].sum(1), [2, 0])


def test_a_mask_names_its_axes_in_its_own_order():
    inputs = {"image": "uint8[height, width]", "mask": "mask[width, height]"}
    got = Buffers(inputs, 1, 4, 6).take({"image": np.ones((3, 2), np.uint8)})
    wanted = np.zeros((1, 6, 4), bool)
    wanted[0, :2, :3] = True
    np.testing.assert_array_equal(got["mask"], wanted)


def test_scalars_and_fixed_dims():
    got = Buffers({"k": "int32[] = -1", "v": "float32[3] = 7"}, 3).take({"k": 5, "v": [1, 2, 3]})
    np.testing.assert_array_equal(got["k"], [5, -1, -1])
    np.testing.assert_array_equal(got["v"], [[1, 2, 3], [7, 7, 7], [7, 7, 7]])


def test_a_batch_of_padding_only():
    inputs = {"x": "float32[length] = 2", "m": "mask[length]", "n": "lengths[length]"}
    got = Buffers(inputs, 2, 3).take()
    np.testing.assert_array_equal(got["x"], np.full((2, 3), 2))
    assert not got["m"].any()
    assert not got["n"].any()


def test_steady_state_allocates_nothing():
    buffers = Buffers({"x": "float32[length]", "m": "mask[length]"}, 4, 8)
    first = buffers.take({"x": [1.0, 2.0]})
    pointers = {name: array.ctypes.data for name, array in first.items()}
    second = buffers.take({"x": [3.0]}, {"x": [4.0]})
    assert {name: array.ctypes.data for name, array in second.items()} == pointers
    assert buffers.nbytes == 4 * 8 * 4 + 4 * 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_items_that_fit_come_through(data):
    height, width, rows = (data.draw(st.integers(1, 6)) for _ in range(3))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, height), st.integers(1, width)), min_size=0, max_size=rows)
    )
    items = [{"a": np.full(shape, 10 + row, np.int16)} for row, shape in enumerate(shapes)]
    got = Buffers({"a": "int16[h, w] = -1", "m": "mask[h, w]"}, rows, height, width).take(*items)
    assert (got["a"][~got["m"]] == -1).all()
    for row in range(rows):
        real = got["m"][row].sum()
        assert real == (np.prod(shapes[row]) if row < len(shapes) else 0)
        if row < len(shapes):
            h, w = shapes[row]
            assert (got["a"][row, :h, :w] == 10 + row).all()
