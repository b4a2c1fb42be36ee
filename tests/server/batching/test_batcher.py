"""The batching policy: pure, with time as a number."""

import math

import pytest
from servax.bucketing import CostModel, Grid, Planner
from servax.server.batching.batcher import Batcher, Launch, Policy
from servax.server.batching.request import State
from servax.server.errors import ConfigError


def flat(bucket):
    return 1e-3 + 1e-9 * bucket.elements


def lengths(launch):
    return [row.sizes[0] for row in launch.rows]


@pytest.mark.parametrize(
    "bad",
    [{"max_wait_s": -1}, {"max_wait_s": math.inf}, {"max_age_s": 0}, {"window": 0}, {"max_age_s": math.nan}],
)
def test_impossible_policies_are_refused(bad):
    with pytest.raises(ConfigError, match="got Policy"):
        Policy(**bad)


def test_rows_wait_until_a_program_is_warm(ask):
    batcher = Batcher(CostModel())
    batcher.add(ask(5))
    assert batcher.next(0.0) == math.inf
    batcher.planner = Planner(Grid.parse("1x8", ("batch", "length")), batcher.cost)
    assert lengths(batcher.next(0.0)) == [5]
    assert batcher.next(0.0) == math.inf


def test_a_model_may_leave_while_its_device_chooses(ask, batcher_of):
    """The compile thread lets programs go beside the device thread, which must outlive that."""
    batcher = batcher_of("1x8,4x8")
    batcher.add(ask(3))
    planner = batcher.planner

    class Leaving:
        def __getattr__(self, name):
            batcher.planner = None
            return getattr(planner, name)

    batcher.planner = Leaving()
    assert isinstance(batcher.next(0.0), Launch)
    assert batcher.next(0.0) == math.inf


def test_B12_one_row_on_an_idle_device_runs_alone_at_once(ask, batcher_of):
    batcher = batcher_of("1x8,2x8,4x8")
    batcher.add(ask(5))
    launch = batcher.next(0.0)
    assert (str(launch.bucket), launch.reason) == ("1x8", "idle")


def test_Q8_what_gathered_runs_as_one_batch(ask, batcher_of, drain):
    batcher = batcher_of("1x8,2x8,4x8,8x8", flat)
    for _ in range(5):
        batcher.add(ask(5))
    (launch,) = drain(batcher)
    assert len(launch.rows) == 5


def test_B6_more_rows_than_the_largest_bucket_are_split(ask, batcher_of, drain):
    batcher = batcher_of("1x128,8x128")
    batcher.add(ask(*[100] * 9))
    assert [(len(one.rows), str(one.bucket)) for one in drain(batcher)] == [(8, "8x128"), (1, "1x128")]


def test_B7_limits_count_rows_and_not_requests(ask, batcher_of, drain):
    batcher = batcher_of("1x8,2x8,4x8,8x8", flat)
    for _ in range(3):
        batcher.add(ask(*[5] * 5))
    assert [len(one.rows) for one in drain(batcher)] == [8, 7]


def test_B8_a_request_of_many_rows_runs_in_pieces_in_order(ask, batcher_of, drain):
    batcher = batcher_of("1x8,2x8,4x8,8x8")
    batcher.add(ask(*[5] * 17))
    launches = drain(batcher)
    assert [len(one.rows) for one in launches] == [8, 8, 1]
    assert [row.index for one in launches for row in one.rows] == list(range(17))


# -- order ---------------------------------------------------------------------------------------------


def test_Q6_equals_are_launched_in_order_of_arrival(ask, batcher_of, drain):
    batcher = batcher_of("1x8,4x8")
    requests = [ask(5, at=float(i)) for i in range(100)]
    for request in requests:
        batcher.add(request)
    assert [row.request for one in drain(batcher, 200.0) for row in one.rows] == requests


def test_Q6_a_large_request_is_not_passed_over_by_an_endless_stream(ask, batcher_of):
    batcher = batcher_of("1x8,2x8,5x8,10x8", flat)
    for _ in range(3):
        batcher.add(ask(5, 5, 5))
    large = ask(*[5] * 8)
    batcher.add(large)
    taken = []
    for _ in range(4):
        for _ in range(4):
            batcher.add(ask(5, 5, 5))
        taken += batcher.next(0.0).rows
    assert sum(row.request is large for row in taken) == 8


def test_a_skipped_row_keeps_its_place(ask, batcher_of):
    """A long row behind short ones is in the next run, since it is the oldest then."""
    batcher = batcher_of("1x8,4x8,1x64")
    batcher.add(ask(5))
    long = ask(60)
    batcher.add(long)
    first = batcher.next(0.0)
    assert lengths(first) == [5]
    for _ in range(10):
        batcher.add(ask(5))
    assert [row.request for row in batcher.next(0.0).rows] == [long]


def test_urgent_rows_go_first(ask, batcher_of, drain):
    batcher = batcher_of("1x8,2x8")
    for priority in (9, 5, 1, 9, 5, 1):
        batcher.add(ask(5, priority=priority))
    order = [row.request.priority for one in drain(batcher) for row in one.rows]
    assert order == [1, 1, 5, 5, 9, 9]


def test_Q5_an_urgent_row_is_in_the_next_run_whatever_was_planned(ask, batcher_of):
    batcher = batcher_of("1x8,8x8", window=50)
    for _ in range(50):
        batcher.add(ask(5, priority=7))
    assert batcher.next(0.0).reason == "full"
    urgent = ask(5, priority=2)
    batcher.add(urgent)
    assert batcher.next(0.0).rows[0].request is urgent


def test_low_urgency_fills_rows_that_would_be_padding(ask, batcher_of, drain):
    batcher = batcher_of("4x8")
    batcher.add(ask(5, priority=9))
    batcher.add(ask(5, priority=1))
    (launch,) = drain(batcher)
    assert sorted(row.request.priority for row in launch.rows) == [1, 9]


@pytest.mark.parametrize("late", [9, 3])
def test_Q4_an_endless_load_of_urgent_rows_starves_nobody(ask, batcher_of, late):
    run_s, max_age_s = 0.05, 1.0
    batcher = batcher_of("1x8,2x8", flat, max_age_s=max_age_s)
    waiting = ask(5, at=0.0, priority=late)
    batcher.add(waiting)
    now_s = 0.0
    while waiting.state is State.WAITING:
        for _ in range(2):
            batcher.add(ask(5, at=now_s, priority=1))
        launch = batcher.next(now_s)
        assert len(launch.rows) == 2
        for row in launch.rows:
            row.request.move(State.RUNNING)
        now_s += run_s
    assert max_age_s <= now_s <= max_age_s + 2 * run_s


def test_aged_rows_go_by_arrival_whatever_their_priorities(ask, batcher_of, drain):
    batcher = batcher_of("1x8", max_age_s=1.0)
    arrivals = {9: 0.0, 5: 0.2, 1: 0.4, 2: 5.0}
    for priority, at in arrivals.items():
        batcher.add(ask(5, at=at, priority=priority))
    order = [row.request.priority for one in drain(batcher, 5.0) for row in one.rows]
    assert order == [9, 5, 1, 2]


# -- choice of buckets ---------------------------------------------------------------------------------


def test_Q7_mixed_lengths_run_in_few_batches(ask, batcher_of, drain):
    batcher = batcher_of("1x16,8x16,1x512,8x512")
    for index in range(32):
        batcher.add(ask(10 if index % 2 else 500))
    assert len(drain(batcher)) == 4


def test_Q7_short_rows_are_not_run_at_the_length_of_a_long_one(ask, batcher_of, drain):
    batcher = batcher_of("1x16,8x16,1x512,8x512")
    for length in [10] * 7 + [500]:
        batcher.add(ask(length))
    assert sorted((lengths(one), str(one.bucket)) for one in drain(batcher)) == [
        ([10] * 7, "8x16"),
        ([500], "1x512"),
    ]


def test_Q7_unless_the_measured_cost_says_so(ask, batcher_of, drain):
    batcher = batcher_of("1x16,8x16,1x512,8x512", flat)
    for length in [10] * 7 + [500]:
        batcher.add(ask(length))
    (launch,) = drain(batcher)
    assert str(launch.bucket) == "8x512"


def test_B4_two_cheap_runs_beat_a_dear_one(ask, batcher_of, drain):
    seconds = {8: 0.104, 16: 0.372}
    batcher = batcher_of("8x256,16x256", lambda bucket: seconds[bucket.rows], max_wait_s=1.0)
    batcher.add(ask(*[200] * 16))
    launches = drain(batcher)
    assert [(str(one.bucket), one.reason) for one in launches] == [("8x256", "full")] * 2


def test_a_batch_may_be_larger_than_the_window(ask, batcher_of, drain):
    batcher = batcher_of("1x8,64x8", window=4)
    batcher.add(ask(*[5] * 64))
    assert [len(one.rows) for one in drain(batcher)] == [64]


# -- waiting -------------------------------------------------------------------------------------------


def test_a_new_program_is_used_at_once(ask, batcher_of):
    batcher = batcher_of("4x8", window=8)
    batcher.add(ask(*[5] * 16))
    batcher.next(0.0)
    grid = Grid.parse("4x8,12x8", ("batch", "length"))
    batcher.planner = Planner(grid, CostModel(flat), window=8)
    assert len(batcher.next(0.0).rows) == 12
