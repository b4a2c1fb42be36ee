"""Runs that were planned before they were sent, beside rows that are planned as they wait."""

import pytest
from servax.server.batching.together import as_run


def planned(batcher, request_of, bucket):
    """A request that is one run in the bucket of that name."""
    with as_run(batcher.planner, next(one for one in batcher.planner.grid if str(one) == bucket)):
        request = request_of()
    batcher.add(request)
    return request


def test_a_planned_run_does_not_wait_behind_a_part_of_a_batch(ask, batcher_of):
    batcher = batcher_of("1x8,4x8,1x64,4x64", max_wait_s=10.0)
    batcher.add(first := ask(60, at=0.0))
    run = planned(batcher, lambda: ask(5, 6, 7, at=1.0), "4x8")
    launch = batcher.next(1.0)
    assert (str(launch.bucket), [row.request for row in launch.rows]) == ("4x8", [run] * 3)
    assert batcher.next(1.0) == pytest.approx(10.0)
    assert [row.request for row in batcher.next(10.0).rows] == [first]


def test_a_planned_run_of_more_rows_than_the_window_runs_whole(ask, batcher_of):
    batcher = batcher_of("1x8,2x8", window=4)
    run = planned(batcher, lambda: ask(*[1] * 9), "2x8")  # as of packed rows, each of several items
    batcher.add(ask(1))
    assert [row.request for row in batcher.next(0.0).rows] == [run] * 9


def test_a_run_that_others_cut_in_two_is_planned_like_others(ask, batcher_of):
    batcher = batcher_of("1x8,2x8,8x8", fair=True, window=8)
    run = planned(batcher, lambda: named("a", ask(*[5] * 8)), "8x8")
    batcher.add(named("b", ask(*[5] * 30)))
    launch = batcher.next(0.0)
    assert len(launch.rows) == launch.bucket.rows
    assert {row.request.client for row in launch.rows} == {"a", "b"}
    assert run.together is None


def named(client, request):
    request.client = client
    return request
