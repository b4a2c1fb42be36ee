import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Packing, PackingError, StreamingPacker, pack, pad_rows


def test_P9_three_segments_in_one_row_of_sixteen() -> None:
    packing = pack([3, 4, 5], 16)
    assert packing.rows == 1
    segments, positions = packing.layout()
    arrays = [np.arange(n) + 100 * n for n in (3, 4, 5)]
    out = np.empty((1, 16), np.int64)
    packing.fill(out, arrays, 0)
    for array, back, number in zip(arrays, packing.gather(out), packing.segment.tolist(), strict=True):
        assert back.tolist() == array.tolist()
        mine = segments[0] == number
        assert out[0][mine].tolist() == array.tolist()
        assert positions[0][mine].tolist() == list(range(len(array)))
    assert segments[0, 12:].tolist() == [0] * 4
    assert sorted(packing.segment.tolist()) == [1, 2, 3]
    changed = [arrays[0], arrays[1] + 1, arrays[2]]
    again = np.empty_like(out)
    packing.fill(again, changed, 0)
    assert packing.gather(again)[0].tolist() == arrays[0].tolist()
    assert packing.gather(again)[2].tolist() == arrays[2].tolist()


def check(packing: Packing, lengths: list[int]) -> None:
    assert packing.lengths.tolist() == lengths
    segments, positions = packing.layout(packing.rows + 1)
    assert (segments > 0).sum() == sum(lengths)
    for row in range(packing.rows):
        numbers = segments[row][segments[row] > 0].tolist()
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))
        assert numbers == sorted(numbers), "segments lie side by side from the left"
    arrays = [np.full((n, 2), i) for i, n in enumerate(lengths)]
    out = np.full((packing.rows + 1, packing.capacity, 2), 9)
    packing.fill(out, arrays, -1)
    assert (out == -1).all(-1).sum() == out.shape[0] * out.shape[1] - sum(lengths)
    for array, back in zip(arrays, packing.gather(out), strict=True):
        assert (array == back).all()
    for place in packing.gather(positions):
        assert place.tolist() == list(range(len(place)))


@given(st.integers(1, 20), st.data())
def test_every_sequence_lies_apart_and_comes_back_in_order(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=30))
    most = data.draw(st.none() | st.integers(1, 4))
    packing = pack(lengths, capacity, max_segments=most)
    check(packing, lengths)
    assert packing.max_segments <= (most or capacity)


def fewest_rows(lengths: list[int], capacity: int) -> int:
    for rows in range(1, len(lengths) + 1):
        for places in itertools.product(range(rows), repeat=len(lengths)):
            loads = np.bincount(places, weights=lengths, minlength=rows)
            if loads.max() <= capacity:
                return rows
    return 0


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_best_fit_decreasing_is_near_the_fewest_rows(lengths: list[int]) -> None:
    assert pack(lengths, 9).rows <= 11 / 9 * fewest_rows(lengths, 9) + 4
    assert pack(lengths, 9).rows == fewest_rows(lengths, 9) or len(lengths) > 5


@given(st.integers(1, 12), st.integers(1, 3), st.data())
def test_a_stream_loses_nothing_and_keeps_order(capacity: int, rows: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    packer = StreamingPacker(rows, capacity)
    taken: list[int] = []
    flushed: list[int] = []
    for length in lengths:
        if not packer.offer(length):
            packing = packer.flush()
            check(packing, taken)
            assert packing.rows <= rows
            flushed += taken
            taken = []
            assert packer.offer(length), "an empty batch takes any admissible length"
        taken.append(length)
        assert len(packer) == len(taken)
    check(packer.flush(), taken)
    assert flushed + taken == lengths
    assert packer.waste == 1


def test_a_refused_offer_changes_nothing() -> None:
    packer = StreamingPacker(1, 10)
    assert packer.offer(7)
    assert not packer.offer(4)
    assert packer.offer(3)
    assert packer.waste == 0
    assert packer.flush().lengths.tolist() == [7, 3]


def test_pooled_outputs_come_back_in_order() -> None:
    packing = pack([2, 8, 3, 5], 8)
    pooled = np.zeros((packing.rows + 1, packing.max_segments + 1, 1))
    for index, (row, segment) in enumerate(zip(packing.row, packing.segment, strict=True)):
        pooled[row, segment - 1] = index
    assert packing.gather_pooled(pooled)[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(PackingError, match="Pooled outputs"):
        packing.gather_pooled(pooled[:1])


def test_packed_equals_padded_for_a_sum_by_segment() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 17, 30)
    arrays = [rng.integers(0, 100, n) for n in lengths]
    padded = np.empty((30, 16), np.int64)
    pad_rows(padded, arrays, 0)
    packing = pack(lengths, 16)
    packed = np.empty((packing.rows, 16), np.int64)
    packing.fill(packed, arrays, 0)
    segments, _ = packing.layout()
    pooled = np.stack([(packed * (segments == s)).sum(1) for s in range(1, packing.max_segments + 1)], axis=1)
    assert packing.gather_pooled(pooled).tolist() == padded.sum(1).tolist()


def test_nothing_packs_into_nothing() -> None:
    packing = pack([], 8)
    assert (packing.rows, packing.waste, packing.max_segments, len(packing)) == (0, 0.0, 0, 0)
    assert packing.layout()[0].shape == (0, 8)
    assert packing.gather(np.zeros((1, 8))) == []


@pytest.mark.parametrize(
    ("lengths", "got"), [([0], "got 0"), ([9], "got 9"), ([1.5], "float64"), ([[1]], "shape")]
)
def test_lengths_fit_a_row(lengths: list[int], got: str) -> None:
    with pytest.raises(PackingError, match=got):
        pack(lengths, 8)


def test_buffers_and_arrays_have_the_packed_shapes() -> None:
    packing = pack([3, 8], 8)
    with pytest.raises(PackingError, match=r"at least 2, 8"):
        packing.gather(np.zeros((1, 8)))
    with pytest.raises(PackingError, match="packed lengths"):
        packing.fill(np.zeros((2, 8)), [np.zeros(3), np.zeros(7)], 0)
    with pytest.raises(PackingError, match="castable to int32"):
        packing.fill(np.zeros((2, 8), np.int32), [np.zeros(3), np.zeros(8)], 0)
    with pytest.raises(PackingError, match="capacity is at least 1"):
        pack([1], 0)
    with pytest.raises(PackingError, match="max_rows is at least 1"):
        StreamingPacker(0, 4)
