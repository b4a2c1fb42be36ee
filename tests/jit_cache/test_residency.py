"""Which programs stay under a cap of bytes."""

from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid
from servax.jit_cache.residency import Residency

AXES = ("batch", "length")
GRID = Grid.parse("1x8,1x16,1x32,1x64", AXES)
ONE, TWO, THREE, FOUR = GRID.buckets


def books(max_bytes=None, opened=()):
    residency = Residency(GRID, [FOUR], max_bytes)
    for bucket in opened:
        assert residency.opened(bucket, 100) == []
    return residency


def test_W4_a_cold_bucket_is_counted_and_wanted():
    residency = books(opened=[FOUR])
    assert residency.launched(1, (60,)) is None
    assert residency.cold_hits == 0
    assert residency.launched(1, (20,)) == THREE
    assert residency.cold_hits == 1
    residency.opened(THREE, 100)
    assert residency.launched(1, (20,)) is None
    assert not residency.complete
    residency.opened(ONE, 1)
    residency.opened(TWO, 1)
    assert residency.complete


def test_C8_the_cap_is_in_bytes_and_the_least_asked_for_leaves():
    residency = books(300, [FOUR, ONE, TWO])
    for _ in range(3):
        residency.launched(1, (8,))
    residency.launched(1, (16,))
    assert residency.launched(1, (32,)) is None  # asked for as often as what would have to leave
    assert residency.launched(1, (32,)) == THREE
    assert residency.opened(THREE, 100) == [TWO]
    assert residency.nbytes == 300
    # A small one needs nobody's place, a large one that of two; the covering one stays in any case.
    assert residency.opened(TWO, 0) == []
    assert set(residency.opened(TWO, 10_000)) == {ONE, THREE}
    assert FOUR not in residency.opened(ONE, 10_000)


@given(st.lists(st.sampled_from([8, 16, 32, 64]), max_size=200))
def test_C8_the_cap_holds_whatever_arrives(lengths):
    residency = books(300, [FOUR])
    for length in lengths:
        wanted = residency.launched(1, (length,))
        if wanted is not None:
            assert wanted == Bucket(AXES, (1, length))
            residency.opened(wanted, 100)
        assert residency.nbytes <= 300
        assert residency.launched(1, (64,)) is None  # pinned: there from the first to the last


def test_C8_more_buckets_than_fit_in_turn_do_not_chase_each_other_out():
    residency = books(300, [FOUR])
    loads = 0
    for _ in range(100):
        for length in (8, 16, 32):
            wanted = residency.launched(1, (length,))
            if wanted is not None:
                residency.opened(wanted, 100)
                loads += 1
    assert loads <= 10


def test_a_new_grid_forgets_what_has_left():
    residency = books(opened=GRID.buckets)
    assert residency.complete
    other = Grid.parse("1x8,1x24,1x64", AXES)
    residency.replan(other)
    assert not residency.complete
    assert residency.nbytes == 200
    assert residency.launched(1, (20,)) == Bucket(AXES, (1, 24))
    assert residency.launched(4, (20,)) is None  # of another grid
