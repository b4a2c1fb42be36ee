import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import PaddingError, fill_lengths, fill_mask, pad_rows


@given(st.integers(0, 3), st.data())
def test_P2_everything_but_the_items_is_padding(ndim: int, data: st.DataObject) -> None:
    dims = tuple(data.draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    batch = data.draw(st.integers(1, 4))
    shape = st.tuples(*(st.integers(0, full) for full in dims))
    shapes = data.draw(st.lists(shape, max_size=batch))
    arrays = [np.arange(1, 1 + int(np.prod(one))).reshape(one) for one in shapes]
    out = np.full((batch, *dims), 99)
    pad_rows(out, arrays, -7)
    expected = np.full((batch, *dims), -7)
    for row, array in enumerate(arrays):
        expected[(row, *map(slice, array.shape))] = array
    assert (out == expected).all()


def test_P1_the_pad_value_is_the_declared_one() -> None:
    out = np.full((2, 4), 42, np.int32)
    pad_rows(out, [np.array([5, 6, 7], np.int32)], 9)
    assert out.tolist() == [[5, 6, 7, 9], [9, 9, 9, 9]]


def test_items_larger_or_more_than_the_buffer_are_refused() -> None:
    out = np.zeros((1, 4), np.int32)
    with pytest.raises(PaddingError, match=r"Item 0 must fit into \(4,\); got shape \(5,\)"):
        pad_rows(out, [np.zeros(5, np.int32)], 0)
    with pytest.raises(PaddingError, match=r"got shape \(1, 4\)"):
        pad_rows(out, [np.zeros((1, 4), np.int32)], 0)
    with pytest.raises(PaddingError, match="batch of 1 rows takes at most that many items; got 2"):
        pad_rows(out, [np.zeros(1, np.int32)] * 2, 0)
    with pytest.raises(PaddingError, match="castable to int32; got float64"):
        pad_rows(out, [np.zeros(1)], 0)


@given(st.integers(1, 3), st.booleans(), st.data())
def test_a_mask_is_one_exactly_on_what_is_real(ndim: int, as_bool: bool, data: st.DataObject) -> None:
    dims = tuple(data.draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    batch = data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.tuples(*(st.integers(0, full) for full in dims)), max_size=batch))
    out = np.full((batch, *dims), 1, bool if as_bool else np.int32)
    fill_mask(out, np.array(sizes, int).reshape(len(sizes), ndim))
    for place in np.ndindex(out.shape):
        row, *spot = place
        real = row < len(sizes) and all(map(int.__lt__, spot, sizes[row]))
        assert out[place] == real


def test_a_mask_without_axes_marks_the_rows() -> None:
    out = np.zeros(3, np.int32)
    fill_mask(out, np.zeros((2, 0), int))
    assert out.tolist() == [1, 1, 0]


@pytest.mark.parametrize("sizes", [[[5]], [[-1]], [[1.0]], [[1, 1]], [1], [[1]] * 3])
def test_a_mask_refuses_sizes_that_are_not_inside(sizes: list[list[int]]) -> None:
    with pytest.raises(PaddingError, match=r"Sizes"):
        fill_mask(np.zeros((2, 4)), sizes)


def test_lengths_of_padding_rows_are_zero() -> None:
    out = np.full(4, 9, np.int32)
    fill_lengths(out, [3, 0])
    assert out.tolist() == [3, 0, 0, 0]
    fill_lengths(out, [])
    assert out.tolist() == [0, 0, 0, 0]
    for wrong in ([1] * 5, [-1], [1.5]):
        with pytest.raises(PaddingError, match="at most 4 integers"):
            fill_lengths(out, wrong)
