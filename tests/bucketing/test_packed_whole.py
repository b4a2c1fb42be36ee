"""Packed runs of items that are all known: each once, packed again as planned, and hardly any padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, CostModel, DoesNotFit, Grid, PackedPlanner, Planner
from servax.bucketing.packed_plan import pack_into
from servax.bucketing.packed_whole import packed_runs

AXES = ("batch", "length")
GRID = Grid.parse("1x8,1x32,2x32,1x128,2x128,4x128", AXES)
SEGMENTS = 8

lengths = st.lists(st.integers(1, 128), max_size=120)


def cost(bucket):
    return 1e-3 + 1e-5 * bucket.elements


def total(runs):
    return sum(cost(run.bucket) for run in runs)


@given(lengths, st.booleans())
@settings(deadline=None)
def test_each_item_once_in_a_run_that_packs_it_again(given_lengths, more):
    runs, left = packed_runs(given_lengths, GRID, cost, SEGMENTS, more=more)
    assert sorted([*left, *(row for run in runs for row in run.rows)]) == list(range(len(given_lengths)))
    assert more or not left
    for run in runs:
        packing, kept = pack_into([given_lengths[row] for row in run.rows], run.bucket, SEGMENTS)
        assert len(kept) == len(run.rows)
        assert packing.rows <= run.bucket.rows


@given(st.lists(st.integers(1, 128).map(lambda size: (size,)), max_size=120))
@settings(deadline=None)
def test_never_dearer_than_the_oldest_first_where_few_are_known(sizes):
    planner = PackedPlanner(GRID, cost, max_segments=SEGMENTS)
    runs, left = planner.whole(sizes)
    assert not left
    longest_first = sorted(sizes, reverse=True)
    assert total(runs) <= min(total(planner.plan(some)) for some in (sizes, longest_first)) * (1 + 1e-9)


def test_mixed_lengths_leave_hardly_any_padding():
    some = np.minimum(np.random.default_rng(0).geometric(1 / 20, 2_000), 128).tolist()
    runs, left = packed_runs(some, GRID, cost, 16)
    oldest_first = PackedPlanner(GRID, cost, max_segments=16).plan([(size,) for size in some])
    assert not left
    for plan in (runs, oldest_first):
        assert 1 - sum(some) / sum(run.bucket.elements for run in plan) < 0.03


def test_what_fills_no_bucket_waits_for_more():
    runs, left = packed_runs([128] * 6, GRID, cost, SEGMENTS, more=True)
    assert [(str(run.bucket), run.rows) for run in runs] == [("4x128", (0, 1, 2, 3))]
    assert left == [4, 5]


def test_a_bucket_that_was_hardly_tried_is_run_once_if_it_may_be_the_best():
    untried = [Bucket(AXES, (2, 128)), Bucket(AXES, (1, 128))]
    costs = {bucket: 1.0 * bucket.rows for bucket in GRID} | {untried[0]: 2.2, untried[1]: 2.0}
    runs, _ = packed_runs([128] * 10, GRID, costs.__getitem__, SEGMENTS, untried=untried)
    assert [str(run.bucket) for run in runs] == ["2x128", "4x128", "4x128"]


def test_an_item_longer_than_every_row_is_refused():
    with pytest.raises(DoesNotFit, match="129 is longer than the longest, 128"):
        packed_runs([3, 129], GRID, cost, SEGMENTS)


@given(st.lists(st.integers(1, 128).map(lambda size: (size,)), max_size=40), st.booleans())
@settings(deadline=None)
def test_a_padded_plan_of_the_whole_is_the_usual_one(sizes, more):
    planner = Planner(GRID, CostModel())
    runs, left = planner.whole(sizes, more=more)
    assert sorted([*left, *(row for run in runs for row in run.rows)]) == list(range(len(sizes)))
    if more:
        assert all(len(run.rows) == run.bucket.rows for run in runs)
    else:
        assert runs == planner.plan(sizes)
