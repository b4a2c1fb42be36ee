"""Packed plans: every item once, nobody overtaken for ever, and less padding than rows of their own."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import (
    Bucket,
    CostModel,
    DoesNotFit,
    Grid,
    GridError,
    PackingError,
    PlanError,
    Planner,
    packed_grid,
)
from servax.bucketing.packed_plan import PackedPlanner, pack_all, pack_into

AXES = ("batch", "length")
GRID = Grid.parse("1x8,1x32,1x128,2x128,4x128", AXES)


def cost(bucket):
    return 1e-3 + 1e-5 * bucket.elements


def planner(**options):
    return PackedPlanner(GRID, cost, **{"max_segments": 8, **options})


def checked(run, sizes):
    packing, kept = pack_into([sizes[row][0] for row in run.rows], run.bucket, 8)
    return len(kept) == len(run.rows) and packing.rows <= run.bucket.rows


@given(st.lists(st.integers(1, 128).map(lambda size: (size,)), max_size=60))
@settings(deadline=None)
def test_each_item_is_in_one_run_that_holds_it(sizes):
    runs = planner(window=16).plan(sizes)
    assert sorted(row for run in runs for row in run.rows) == list(range(len(sizes)))
    # What fits in the order of the plan fits again: packing is a function of the items alone.
    assert all(checked(run, sizes) for run in runs)


@given(st.lists(st.integers(1, 128).map(lambda size: (size,)), min_size=1, max_size=40), st.data())
@settings(deadline=None)
def test_the_first_is_part_of_the_next_run(sizes, data):
    first = data.draw(st.integers(0, len(sizes) - 1))
    run = planner().next_run(sizes, first=first)
    assert run.rows[0] == first
    assert len(run.rows) == len(set(run.rows))


@given(st.lists(st.integers(1, 64).map(lambda size: (size,)), min_size=1, max_size=8))
@settings(deadline=None)
def test_no_bucket_is_cheaper_for_what_it_would_hold_where_all_get_into_one_run(sizes):
    run = planner().next_run(sizes)
    rate = cost(run.bucket) / sum(sizes[row][0] for row in run.rows)
    for bucket in GRID:
        if bucket.item_sizes[0] >= sizes[0][0]:
            only = PackedPlanner(Grid(AXES, [bucket]), cost, max_segments=8)
            fitting = [size for size in sizes if size[0] <= bucket.item_sizes[0]]
            held = sum(fitting[row][0] for row in only.next_run(fitting).rows)
            assert rate <= cost(bucket) / held * (1 + 1e-9)


@pytest.mark.parametrize(("dearer", "bucket"), [(1.05, "4x128"), (1.5, "16x32")])
def test_the_old_are_overtaken_only_where_that_gains_much(dearer, bucket):
    grid = Grid.parse("4x128,16x32", AXES)
    some = PackedPlanner(grid, lambda one: dearer if one.rows == 4 else 1.0, max_segments=8)
    run = some.next_run([(32,)] + [(128,)] * 3 + [(32,)] * 40)
    assert str(run.bucket) == bucket
    assert set(run.rows) == ({0, 1, 2, 3, 4, 5, 6} if bucket == "4x128" else {0, *range(4, 19)})


def test_costs_are_followed_as_they_are_learned():
    model = CostModel(cost)
    packed = PackedPlanner(GRID, model, max_segments=8)
    assert packed.next_run([(100,)] * 4).bucket == Bucket(AXES, (4, 128))
    for _ in range(5):
        for rows, seconds in ((1, 1.0), (2, 2.1), (4, 9.0)):
            model.observe(Bucket(AXES, (rows, 128)), seconds)
    assert packed.next_run([(100,)] * 4).bucket == Bucket(AXES, (1, 128))
    assert packed.next_run([(100,)]).bucket == Bucket(AXES, (1, 128))


def test_the_oldest_go_before_what_would_fill_better():
    sizes = [(40,)] * 12 + [(128,)] * 40
    run = planner().next_run(sizes)
    assert run.bucket == Bucket(AXES, (4, 128))
    assert set(run.rows) == set(range(12))


@given(st.lists(st.integers(1, 32), min_size=1, max_size=20), st.sampled_from(GRID.buckets[1:]))
def test_all_or_none(lengths, bucket):
    packing = pack_all(lengths, bucket, 8)
    if packing is None:
        longest = sorted(lengths, reverse=True)
        assert len(pack_into(longest, bucket, 8)[1]) < len(lengths)
    else:
        assert packing.lengths.tolist() == lengths
        cells = {
            (r, c)
            for r, s, n in zip(packing.row, packing.start, lengths, strict=True)
            for c in range(s, s + n)
        }
        assert len(cells) == sum(lengths)


def test_one_short_item_takes_the_small_bucket():
    run = planner().next_run([(5,)])
    assert (str(run.bucket), run.rows) == ("1x8", (0,))


def test_many_items_share_rows_and_waste_little():
    sizes = [(10 + (row * 37) % 100,) for row in range(64)]
    runs = planner(max_segments=16).plan(sizes)
    real, computed = sum(size for (size,) in sizes), sum(run.bucket.elements for run in runs)
    padded = sum(run.bucket.elements for run in Planner(GRID, cost).plan(sizes))
    assert 1 - real / computed < 0.12
    assert computed < 0.8 * padded


@given(
    st.lists(st.integers(1, 32), min_size=1, max_size=30),
    st.sampled_from(GRID.buckets[1:]),
    st.integers(1, 6),
)
def test_a_subset_that_got_in_gets_in_again(lengths, bucket, segments):
    packing, kept = pack_into(lengths, bucket, segments)
    again, same = pack_into([lengths[place] for place in kept], bucket, segments)
    assert same == list(range(len(kept)))
    assert kept[:1] == [0]
    assert packing.rows <= bucket.rows
    assert packing.max_segments <= segments
    assert (again.row == packing.row).all()
    assert (again.start == packing.start).all()


def test_the_smallest_bucket_for_given_items():
    assert planner().smallest([(8,)]) == Bucket(AXES, (1, 8))
    assert planner().smallest([(30,), (90,)]) == Bucket(AXES, (1, 128))
    assert planner().smallest([(100,), (100,)]) == Bucket(AXES, (2, 128))
    with pytest.raises(DoesNotFit, match="fit none"):
        planner().smallest([(100,)] * 5)


def test_full_means_nearly_no_room():
    assert planner().full(Bucket(AXES, (1, 32)), [(20,), (10,)])
    assert not planner().full(Bucket(AXES, (1, 32)), [(20,)])


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="one axis beside batch"):
        PackedPlanner(Grid.parse("1x8x8", ("batch", "height", "width")), cost, max_segments=2)
    with pytest.raises(DoesNotFit, match="longer than the longest"):
        planner().next_run([(129,)])
    with pytest.raises(PackingError):
        pack_into([9], Bucket(AXES, (1, 8)), 2)
    with pytest.raises(PlanError, match="in the window"):
        planner().next_run([])
    assert math.isfinite(cost(planner().with_cost(cost).grid.buckets[0]))


@given(st.integers(1, 3000), st.integers(1, 4096), st.integers(1, 64))
def test_a_packed_grid_covers_its_limit_and_stays_small(limit, elements, smallest):
    grid = packed_grid(limit, elements=elements, smallest=smallest)
    grid.check_coverage({"length": limit})
    assert grid.limits["length"] == limit
    assert all(bucket.rows == 1 or bucket.elements <= elements for bucket in grid)
    assert len(grid) <= 120


def test_the_packed_grid_of_256_tokens():
    lone = "1x16 1x24 1x32 1x40 1x48 1x56 1x64 1x80 1x96 1x112 1x128 1x160 1x192 1x224 1x256"
    text = f"{lone} 4x64 8x64 16x64 2x128 4x128 8x128 2x192 4x192 2x256 4x256"
    assert packed_grid(256) == Grid.parse(text, AXES)


@pytest.mark.parametrize("bounds", [{"limit": 0}, {"limit": 9, "elements": 0}, {"limit": 9, "smallest": 0}])
def test_a_packed_grid_has_sizes(bounds):
    with pytest.raises(GridError, match="at least 1"):
        packed_grid(**bounds)


def test_segments_bound_what_a_bucket_is_worth():
    # 8 items of 2 tokens fill a row of 16 columns, and its segments; wider rows would be mostly empty.
    grid = Grid.parse("1x16,4x16,4x128", AXES)
    run = PackedPlanner(grid, cost, max_segments=8).next_run([(2,)] * 200)
    assert (str(run.bucket), len(run.rows)) == ("4x16", 32)
