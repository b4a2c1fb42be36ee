"""When a batch that could be fuller starts; pure, with time as a number."""

import math

import pytest
from servax.bucketing import Bucket


def test_Q9_a_row_waits_from_its_own_arrival(ask, batcher_of):
    batcher = batcher_of("1x8,4x8", max_wait_s=0.05)
    batcher.add(ask(5, at=10.013))
    assert batcher.next(10.013) == pytest.approx(10.063)
    assert batcher.next(10.062) == pytest.approx(10.063)
    launch = batcher.next(10.064)
    assert (launch.reason, len(launch.rows)) == ("window", 1)


def test_Q9_the_oldest_row_ends_the_wait_for_all(ask, batcher_of):
    batcher = batcher_of("1x8,4x8", max_wait_s=0.05)
    for at in (0.0, 0.02, 0.049):
        batcher.add(ask(5, at=at))
    launch = batcher.next(0.05)
    assert (launch.reason, len(launch.rows)) == ("window", 3)


def test_Q9_an_urgent_newcomer_does_not_prolong_the_wait_of_an_older_row(ask, batcher_of):
    batcher = batcher_of("1x8,4x8,1x64,4x64", max_wait_s=0.05)
    old = ask(60, at=0.0, priority=9)
    batcher.add(old)
    batcher.add(ask(5, at=0.04, priority=1))
    assert batcher.next(0.04) == pytest.approx(0.05)
    assert [row.request for row in batcher.next(0.05).rows] == [old]
    assert batcher.next(0.05) == pytest.approx(0.09)


def test_a_full_batch_does_not_wait(ask, batcher_of):
    batcher = batcher_of("1x8,4x8", max_wait_s=10.0)
    for _ in range(4):
        batcher.add(ask(5))
    launch = batcher.next(0.0)
    assert (launch.reason, len(launch.rows)) == ("full", 4)


def test_a_full_batch_does_not_wait_behind_a_part_of_one(ask, batcher_of):
    batcher = batcher_of("1x8,4x8,1x64,4x64", max_wait_s=10.0)
    batcher.add(ask(60, at=0.0))
    batcher.add(ask(*[5] * 4, at=1.0))
    launch = batcher.next(1.0)
    assert (launch.reason, [row.sizes[0] for row in launch.rows]) == ("full", [5] * 4)
    assert batcher.next(1.0) == pytest.approx(10.0)


def test_Q6_a_full_batch_that_goes_before_its_turn_takes_the_oldest(ask, batcher_of):
    """The long row and one short are to wait together; the eight shorts that go are the oldest eight."""
    batcher = batcher_of("1x8,8x8,1x64,2x64,4x64", lambda b: 1e-3 + 1e-5 * b.elements, max_wait_s=10.0)
    long, shorts = ask(60), [ask(5) for _ in range(9)]
    for request in (long, *shorts):
        batcher.add(request)
    launch = batcher.next(0.0)
    assert (launch.reason, [row.request for row in launch.rows]) == ("full", shorts[:8])
    assert batcher.next(0.0) == pytest.approx(10.0)


def test_Q6_the_row_that_must_go_goes_and_its_mates_are_the_oldest(ask, batcher_of):
    batcher = batcher_of("1x8,8x8,1x64,2x64,4x64", lambda b: 1e-3 + 1e-5 * b.elements, max_wait_s=10.0)
    long, shorts = ask(60), [ask(5) for _ in range(3)]
    hasty = ask(5, deadline=0.001)
    for request in (long, *shorts, hasty):
        batcher.add(request)
    launch = batcher.next(0.0)
    assert launch.reason == "deadline"
    assert hasty in [row.request for row in launch.rows]
    mates = [row.request for row in launch.rows if row.request not in (hasty, long)]
    assert mates == shorts[: len(mates)]


@pytest.mark.parametrize(("deadline", "rows"), [(math.inf, 16), (0.31, 16), (0.29, 8)])
def test_no_deadline_pays_for_trying_a_bucket(ask, batcher_of, deadline, rows):
    batcher = batcher_of("8x16,16x16", lambda bucket: float(bucket.elements))
    for _ in range(3):
        batcher.cost.observe(Bucket(("batch", "length"), (8, 16)), 0.128)
    batcher.cost.observe(Bucket(("batch", "length"), (16, 16)), 0.300)
    for _ in range(15):
        batcher.add(ask(16))
    batcher.add(ask(16, deadline=deadline))
    # Hoped to take 0.24 s; measured once, at 0.30.
    assert batcher.next(0.0).bucket.rows == rows


def test_a_deadline_ends_the_wait_in_time_for_the_run(ask, batcher_of):
    batcher = batcher_of("1x8,4x8", lambda bucket: 0.2, max_wait_s=5.0)
    batcher.add(ask(5, at=0.0, deadline=1.0))
    assert batcher.next(0.0) == pytest.approx(0.8)
    launch = batcher.next(0.81)
    assert launch.reason == "deadline"
