import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, CoverageError, DoesNotFit, Grid, GridError, Ladder, powers_of_two

TEXT = ("batch", "length")
IMAGE = ("batch", "height", "width")


def test_a_bucket_knows_its_shape() -> None:
    bucket = Bucket(TEXT, (8, 64))
    assert (bucket.rows, bucket.item_sizes, bucket.elements) == (8, (64,), 512)
    assert bucket["length"] == 64
    assert str(bucket) == "8x64"
    assert Bucket.parse("8x64", TEXT) == bucket
    assert bucket.holds(8, (64,))
    assert not bucket.holds(9, (64,))
    assert not bucket.holds(8, (65,))
    assert bucket != Bucket(("batch", "frames"), (8, 64))


def test_a_bucket_travels_between_processes() -> None:
    bucket = Bucket(TEXT, (8, 64))
    again = pickle.loads(pickle.dumps(bucket))
    assert again == bucket
    assert hash(again) == hash(bucket)


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        (("length",), (8,), "the first is 'batch'"),
        (("batch", "a", "a"), (1, 2, 3), "distinct"),
        ((), (), "distinct names"),
        (TEXT, (8,), "one size for each"),
        (TEXT, (8, 0), "at least 1"),
        (TEXT, (8, 2.5), "integers"),
        (TEXT, (True, 2), "integers"),
    ],
)
def test_a_bucket_has_a_size_for_each_axis(
    axes: tuple[str, ...], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(GridError, match=message):
        Bucket(axes, sizes)


@pytest.mark.parametrize("text", ["", "8x", "8 by 64", "8x64x2"])
def test_a_bucket_is_written_with_x(text: str) -> None:
    with pytest.raises(GridError, match="got"):
        Bucket.parse(text, TEXT)


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(GridError, match="'width'"):
        Bucket(TEXT, (1, 2))["width"]
    with pytest.raises(GridError, match="'width'"):
        Grid.parse("1x2", TEXT).rungs("width")


def test_fixed_size_servables_have_batch_alone() -> None:
    grid = Grid.product({"batch": powers_of_two().ladder(8)})
    assert grid.item_axes == ()
    assert grid.smallest(3, ()).sizes == (4,)
    assert grid.max_rows_for(()) == grid.max_rows == 8
    grid.check_coverage({})


def test_B3_every_admissible_shape_has_a_bucket_or_a_split() -> None:
    ladders = {"batch": Ladder((1, 2, 4, 8)), "length": Ladder((128, 256, 512))}
    grid = Grid.product(ladders, max_elements=1024)
    assert max(bucket.elements for bucket in grid) == 1024
    assert grid.max_rows_for((257,)) == 2
    grid.check_coverage({"length": 512})
    assert not grid.candidates(3, (257,))
    with pytest.raises(CoverageError, match="batch=3, length=257 has none"):
        grid.check_coverage({"length": 512, "batch": 8}, split=False)
    with pytest.raises(
        CoverageError, match=r"length=513 has none.*nearest bucket is 1x512|nearest bucket is"
    ):
        grid.check_coverage({"length": 600})


def test_the_cap_always_leaves_the_smallest_batch() -> None:
    ladders = {"batch": Ladder((2, 4)), "length": Ladder((128, 4096))}
    grid = Grid.product(ladders, max_elements=100)
    assert [bucket.sizes for bucket in grid] == [(2, 128), (2, 4096)]


def test_B4_the_smallest_is_not_the_first_that_fits() -> None:
    grid = Grid.explicit(TEXT, [(1, 4096), (4, 2048), (8, 128), (8, 512)])
    assert str(grid.smallest(3, (100,))) == "8x128"
    assert list(map(str, grid.candidates(3, (100,)))) == ["8x128", "8x512", "4x2048"]


def test_B6_beyond_every_bucket_names_the_nearest() -> None:
    grid = Grid.parse("1x64 8x128", TEXT)
    with pytest.raises(DoesNotFit, match="9x100 fits none, the nearest is 8x128"):
        grid.smallest(9, (100,))
    with pytest.raises(DoesNotFit, match="1x129 fits none"):
        grid.max_rows_for((129,))
    assert str(grid.nearest(2, (129,))) == "8x128"


def test_a_grid_is_a_set_of_buckets() -> None:
    grid = Grid.parse("8x64, 1x64 8x64", TEXT)
    assert [str(bucket) for bucket in grid] == ["1x64", "8x64"]
    assert grid == Grid.explicit(TEXT, [(8, 64), (1, 64)])
    assert hash(grid) == hash(Grid.explicit(TEXT, [(8, 64), (1, 64)]))
    smaller = grid.without(Bucket(TEXT, (8, 64)))
    assert [str(bucket) for bucket in smaller] == ["1x64"]
    assert Bucket(TEXT, (8, 64)) not in smaller
    with pytest.raises(GridError, match="at least one bucket"):
        smaller.without(Bucket(TEXT, (1, 64)))
    with pytest.raises(GridError, match="got 8x64"):
        smaller.without(Bucket(TEXT, (8, 64)))
    assert grid.limits == {"batch": 8, "length": 64}


def test_axes_must_agree() -> None:
    with pytest.raises(GridError, match="share its axes"):
        Grid(TEXT, [Bucket(("batch",), (1,))])
    with pytest.raises(GridError, match="'batch'"):
        Grid.product({"length": Ladder((4,))})
    with pytest.raises(GridError, match="one size for each"):
        Grid.parse("1x4", TEXT).candidates(1, ())
    with pytest.raises(GridError, match="Limits are needed"):
        Grid.parse("1x4", TEXT).check_coverage({})
    with pytest.raises(GridError, match="at least 1; got 0"):
        Grid.parse("1x4", TEXT).check_coverage({"length": 0})
    with pytest.raises(GridError, match="max_elements"):
        Grid.product({"batch": Ladder((1,))}, max_elements=0)


sizes = st.integers(1, 6)


@given(st.sets(st.tuples(sizes, sizes, sizes), min_size=1, max_size=8), sizes, sizes, sizes, st.booleans())
def test_coverage_is_decided_as_by_trying_every_shape(
    boxes: set[tuple[int, int, int]], rows: int, height: int, width: int, split: bool
) -> None:
    grid = Grid.explicit(IMAGE, boxes)
    limits = {"height": height, "width": width, **({} if split else {"batch": rows})}
    shapes = itertools.product(range(1, 2 if split else rows + 1), range(1, height + 1), range(1, width + 1))
    holes = [s for s in shapes if not any(all(map(int.__ge__, box, s)) for box in boxes)]
    if not holes:
        grid.check_coverage(limits, split=split)
        return
    named = f"batch={holes[0][0]}, height={holes[0][1]}, width={holes[0][2]} has none"
    with pytest.raises(CoverageError, match=named):
        grid.check_coverage(limits, split=split)


@given(
    st.sets(st.integers(1, 40), min_size=1, max_size=5),
    st.sets(st.integers(1, 700), min_size=1, max_size=6),
    st.none() | st.integers(1, 4000),
)
def test_a_product_covers_its_limits_under_any_cap(
    batch: set[int], length: set[int], cap: int | None
) -> None:
    ladders = {"batch": Ladder(tuple(sorted(batch))), "length": Ladder(tuple(sorted(length)))}
    grid = Grid.product(ladders, max_elements=cap)
    grid.check_coverage({"length": max(length)})
    for size in range(1, max(length) + 1, 7):
        assert grid.smallest(grid.max_rows_for((size,)), (size,)).holds(1, (size,))


@given(st.sets(st.tuples(sizes, sizes), min_size=1), sizes, sizes)
def test_the_smallest_has_the_fewest_elements(boxes: set[tuple[int, int]], rows: int, length: int) -> None:
    grid = Grid.explicit(TEXT, boxes)
    fitting = [math.prod(box) for box in boxes if box[0] >= rows and box[1] >= length]
    found = grid.candidates(rows, (length,))
    assert sorted(bucket.elements for bucket in found) == sorted(fitting)
    if fitting:
        assert grid.smallest(rows, (length,)).elements == min(fitting)
