from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, PaddingError, pad_batch, unpad

TEXT = ("batch", "length")


class Pair(NamedTuple):
    left: Any
    right: Any


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_what_is_padded_comes_back(lengths: list[int]) -> None:
    items = [
        {"ids": np.arange(n), "parts": Pair([np.ones((n, 3), np.float32)], (np.int32(n),))} for n in lengths
    ]
    batch = pad_batch(items, Bucket(TEXT, (4, 6)), pad=-1)
    assert batch.data["ids"].shape == (4, 6)
    assert batch.data["parts"].left[0].shape == (4, 6, 3)
    assert batch.data["parts"].right[0].shape == (4,)
    assert batch.mask().sum() == sum(lengths)
    assert batch.waste == pytest.approx(1 - sum(lengths) / 24)
    again = unpad(batch.data, batch)
    assert len(again) == len(items)
    for before, after in zip(items, again, strict=True):
        assert isinstance(after["parts"], Pair)
        assert (after["ids"] == before["ids"]).all()
        assert after["parts"].left[0].shape == before["parts"].left[0].shape


def test_P13_images_and_labels_name_their_dims() -> None:
    items = [{"image": np.ones((30, 40, 3), np.uint8), "label": np.array([1, 2])}]
    bucket = Bucket(("batch", "height", "width"), (2, 64, 64))
    batch = pad_batch(
        items, bucket, dims={"image": "height width _", "label": "_"}, pad={"image": 7, "label": 0}
    )
    assert batch.data["image"].shape == (2, 64, 64, 3)
    assert batch.data["image"][0, 30:].min() == 7
    assert batch.data["label"].tolist() == [[1, 2], [0, 0]]
    assert batch.sizes.tolist() == [[30, 40]]
    assert batch.mask()[0, :30, :40].all()
    cut = unpad(batch.data["image"].sum(-1), batch, dims="height width")
    assert cut[0].shape == (30, 40)


def test_items_of_fixed_size_are_stacked() -> None:
    batch = pad_batch([np.ones(3), np.zeros(3)], Bucket(("batch",), (4,)))
    assert batch.data.shape == (4, 3)
    assert [row.tolist() for row in unpad(batch.data, batch)] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([], {}, "at least one item"),
        ([{"a": np.ones(1)}, {"b": np.ones(1)}], {}, "same structure; item 0 has"),
        ([np.ones(9)], {}, "Leaf of the item: Item 0 must fit"),
        ([np.ones(1)] * 3, {}, "at most that many items; got 3"),
        ([{"a": np.ones(1), "b": np.ones(2)}], {}, "item 0 has length 1 and, in leaf b, 2"),
        ([np.ones(3)], {"dims": "_"}, r"\['length'\] is of none"),
        ([np.ones(3)], {"dims": "width"}, "got 'width'"),
        ([np.ones(3)], {"dims": {"a": "length"}}, r"dims name each leaf of \[''\]"),
        ([{"a": np.ones(3)}], {"pad": {"b": 0}}, r"one for each of \['a'\]"),
        ([{"a": np.ones((3, 2))}, {"a": np.ones((3, 4))}], {}, "Leaf a: Item 1 must fit"),
    ],
)
def test_disagreements_name_the_leaf(items: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PaddingError, match=message):
        pad_batch(items, Bucket(TEXT, (2, 8)), **options)


def test_outputs_have_the_batch_in_front() -> None:
    batch = pad_batch([np.ones(3)], Bucket(TEXT, (2, 8)))
    with pytest.raises(PaddingError, match="batch of 2 in front"):
        unpad(np.ones((1, 8)), batch)
