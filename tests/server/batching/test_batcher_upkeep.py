"""What waits is given back, forgotten when it ended, and costs no more the more there is."""

import math
import time

import pytest
from servax.server.batching.request import State


def test_Q3_late_and_ended_rows_never_run(ask, batcher_of):
    batcher = batcher_of("1x8,4x8")
    late, gone, alive = ask(5, deadline=1.0), ask(5), ask(5, deadline=2.0)
    for request in (late, gone, alive):
        batcher.add(request)
    gone.move(State.CANCELLED)
    assert [row.request for row in batcher.next(1.0).rows] == [alive]
    batcher.add(ask(5, deadline=3.0))
    assert batcher.next(3.0) == math.inf


def test_a_row_that_ends_after_it_was_planned_does_not_run(ask, batcher_of, drain):
    batcher = batcher_of("4x8", window=16)
    requests = [ask(5) for _ in range(16)]
    for request in requests:
        batcher.add(request)
    batcher.next(0.0)
    requests[5].move(State.CANCELLED)
    rest = [row.request for one in drain(batcher) for row in one.rows]
    assert rest == [one for one in requests[4:] if one is not requests[5]]


def test_clear_gives_back_what_waits(ask, batcher_of, drain):
    batcher = batcher_of("1x8,2x8")
    gone, waiting = ask(5), [ask(5), ask(5, priority=1), ask(5, priority=9)]
    for request in (gone, *waiting):
        batcher.add(request)
    batcher.next(0.0)
    gone.move(State.CANCELLED)
    assert {row.request for row in batcher.clear()} <= set(waiting)
    assert drain(batcher) == []


def test_less_urgent_requests_come_least_urgent_and_youngest_first(ask, batcher_of):
    batcher = batcher_of("1x8")
    low = [ask(5, 5, priority=9), ask(5, priority=9), ask(5, priority=7), ask(5, priority=5)]
    for request in low:
        batcher.add(request)
    assert list(batcher.less_urgent(5)) == [low[1], low[0], low[2]]
    assert list(batcher.less_urgent(9)) == []


def test_cancelled_rows_do_not_pile_up_while_the_device_is_busy(ask, batcher_of):
    batcher = batcher_of("1x8")
    batcher.add(kept := ask(5))
    for _ in range(10_000):
        request = ask(5)
        batcher.add(request)
        request.move(State.CANCELLED)
        batcher.forget(1)
    assert len(batcher._line) < 200
    assert [row.request for row in batcher.next(0.0).rows] == [kept]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_cost_of_a_launch_does_not_grow_with_the_queue(ask, batcher_of, mixed):
    def launch_s(waiting):
        batcher = batcher_of("1x16,8x16,32x16,1x64,8x64,32x64")
        for index in range(waiting):
            batcher.add(ask(5 if index % 3 else 50, priority=5 if index % 2 or not mixed else 3))
        begin = time.thread_time()
        for _ in range(20):
            batcher.next(0.0)
        return (time.thread_time() - begin) / 20

    few, many = min(launch_s(700) for _ in range(5)), min(launch_s(10_000) for _ in range(5))
    assert many < 5 * few + 1e-4
