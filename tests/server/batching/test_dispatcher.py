"""The queue and the states of requests, driven by hand: no threads, no device, no sleeping."""

import math
import threading

import pytest
from servax.server.batching.admission import Load, QueueLimits
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher, Work
from servax.server.batching.request import State
from servax.server.batching.sinks import deliver
from servax.server.batching.turns import Turns
from servax.server.errors import (
    Closed,
    DeadlineExceeded,
    ModelError,
    Overloaded,
    TooManyRows,
    Unavailable,
)


def linear(bucket):
    return 1e-4 + 1e-5 * bucket.elements


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def desk(clock, batcher_of):
    """Makes a dispatcher with one lane of buckets of up to 4 rows of 8."""

    def make(lanes=1, buckets="1x8,2x8,4x8", stall_s=math.inf, policy=None, **limits):
        dispatcher = Dispatcher(clock, QueueLimits(**limits), stall_s=stall_s)
        for _ in range(lanes):
            dispatcher.add_lane(batcher_of(buckets, linear, **(policy or {})))
        return dispatcher

    return make


class Job:
    def __init__(self):
        self.error = None

    def fail(self, error):
        self.error = error


def answer(dispatcher, work):
    dispatcher.finish(work.launch.rows, [[f"out of {row.index}"] for row in work.launch.rows])


def test_a_request_goes_through(desk, ask, told):
    dispatcher = desk()
    request = ask(5, 6)
    dispatcher.offer(0, request)
    assert dispatcher.load() == (Load(2, 11, 44), 0)
    work = dispatcher.take(block=False)
    assert dispatcher.load() == (Load(), 2)
    assert request.state is State.RUNNING
    assert not dispatcher.idle
    answer(dispatcher, work)
    assert told.requests == [request]
    assert request.results == [["out of 0"], ["out of 1"]]
    assert dispatcher.idle
    assert dispatcher.take(block=False) is None


def test_B8_a_split_request_is_answered_once_all_pieces_are(desk, ask, told):
    dispatcher = desk()
    request = ask(*[5] * 9)
    dispatcher.offer(0, request)
    sizes = []
    while work := dispatcher.take(block=False):
        assert told.requests == []
        sizes.append(len(work.launch.rows))
        answer(dispatcher, work)
    assert sizes == [4, 4, 1]
    assert request.results == [[f"out of {index}"] for index in range(9)]
    assert told.states() == [State.DONE]


def test_B8_a_failing_piece_drops_those_not_launched_and_nobody_else(desk, ask, told):
    dispatcher = desk()
    request, other = ask(*[5] * 9), ask(5)
    dispatcher.offer(0, request)
    dispatcher.offer(0, other)
    answer(dispatcher, dispatcher.take(block=False))
    second = dispatcher.take(block=False)
    dispatcher.fail(second.launch.rows, lambda: ModelError("bad row"))
    assert told.states() == [State.FAILED]
    assert str(told.requests[0].error) == "bad row"
    third = dispatcher.take(block=False)
    assert [row.request for row in third.launch.rows] == [other]
    answer(dispatcher, third)
    assert told.requests == [request, other]
    assert dispatcher.idle


def test_F1_each_caller_gets_an_error_of_its_own(desk, ask, told):
    dispatcher = desk()
    for _ in range(3):
        dispatcher.offer(0, ask(5))
    cause = ValueError("why")

    def make():
        error = Overloaded("no", retry_after_s=7.0)
        error.__cause__ = cause
        return error

    dispatcher.fail(dispatcher.take(block=False).launch.rows, make)
    errors = [request.error for request in told.requests]
    assert len({id(error) for error in errors}) == 3
    assert all(error.retry_after_s == 7.0 and error.__cause__ is cause for error in errors)


# -- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"rows": 64}, {"elements": 64 * 5}, {"bytes": 64 * 20}])
def test_O2_the_ninth_request_is_refused_at_once(desk, ask, limits):
    dispatcher = desk(**limits)
    for _ in range(8):
        dispatcher.offer(0, ask(*[5] * 8))
    before = dispatcher.load()
    with pytest.raises(Overloaded):
        dispatcher.offer(0, ask(5))
    assert dispatcher.load() == before == (Load(64, 320, 1280), 0)


def test_O2_rows_that_were_launched_make_room(desk, ask):
    dispatcher = desk(rows=4)
    dispatcher.offer(0, ask(*[5] * 4))
    work = dispatcher.take(block=False)
    dispatcher.offer(0, ask(*[5] * 4))
    with pytest.raises(Overloaded):
        dispatcher.offer(0, ask(5))
    answer(dispatcher, work)


def test_a_request_that_never_fits_is_bad(desk, ask):
    with pytest.raises(TooManyRows):
        desk(rows=4).offer(0, ask(*[5] * 5))


def test_O4_a_less_urgent_request_gives_way(desk, ask, told):
    dispatcher = desk(rows=4, lanes=2)
    low = [ask(5, priority=8) for _ in range(4)]
    for index, request in enumerate(low):
        dispatcher.offer(index % 2, request)
    urgent = ask(5, priority=2)
    dispatcher.offer(0, urgent)
    assert told.requests == [low[2]]
    assert isinstance(low[2].error, Overloaded)
    assert dispatcher.load()[0].rows == 4


def test_O4_an_equal_does_not_displace(desk, ask, told):
    dispatcher = desk(rows=1)
    dispatcher.offer(0, ask(5))
    with pytest.raises(Overloaded):
        dispatcher.offer(0, ask(5))
    assert told.requests == []


def test_O4_a_running_request_does_not_give_way(desk, ask, told):
    dispatcher = desk(rows=4)
    split = ask(*[5] * 4, priority=9)
    dispatcher.offer(0, split)
    dispatcher.take(block=False)
    dispatcher.offer(0, ask(*[5] * 4, priority=9))
    launched = ask(*[5] * 4, priority=1)
    dispatcher.offer(0, launched)
    with pytest.raises(Overloaded):
        dispatcher.offer(0, ask(*[5] * 4, priority=1))
    assert len(told.requests) == 1
    assert split.state is State.RUNNING


# -- deadlines and cancellation ------------------------------------------------------------------------


def test_Q1_a_deadline_does_not_wait_for_the_device(desk, ask, told, clock):
    dispatcher = desk(buckets="1x8")
    dispatcher.offer(0, ask(5))
    dispatcher.take(block=False)
    late = ask(5, at=100.0, deadline=100.2)
    dispatcher.offer(0, late)
    clock.advance(0.19)
    dispatcher.expire()
    assert told.requests == []
    clock.advance(0.02)
    dispatcher.expire()
    assert told.requests == [late]
    assert isinstance(late.error, DeadlineExceeded)
    assert "within 0.2 s and was still waiting" in str(late.error)
    assert dispatcher.load() == (Load(), 1)


def test_Q3_expired_rows_do_not_run_even_if_no_timer_came_by(desk, ask, told, clock):
    dispatcher = desk()
    late, alive = [ask(5, deadline=101.0), ask(5, deadline=101.0)], ask(5, deadline=200.0)
    for request in (*late, alive):
        dispatcher.offer(0, request)
    clock.advance(1.0)
    work = dispatcher.take(block=False)
    assert [row.request for row in work.launch.rows] == [alive]
    assert told.requests == late
    assert told.states() == [State.EXPIRED] * 2


def test_Q3_nothing_runs_if_all_expired(desk, ask, told, clock):
    dispatcher = desk()
    for _ in range(3):
        dispatcher.offer(0, ask(5, deadline=101.0))
    clock.advance(1.0)
    assert dispatcher.take(block=False) is None
    assert told.states() == [State.EXPIRED] * 3
    assert dispatcher.idle


def test_a_running_request_expires_too_and_its_answer_is_dropped(desk, ask, told, clock):
    dispatcher = desk()
    request, mate = ask(5, at=100.0, deadline=101.0), ask(5)
    dispatcher.offer(0, request)
    dispatcher.offer(0, mate)
    work = dispatcher.take(block=False)
    clock.advance(1.0)
    dispatcher.expire()
    assert "still running" in str(request.error)
    answer(dispatcher, work)
    assert told.requests == [request, mate]
    assert told.states() == [State.EXPIRED, State.DONE]


def test_X1_cancelling_makes_room_at_once(desk, ask):
    dispatcher = desk(buckets="1x8", rows=100)
    requests = [ask(5) for _ in range(100)]
    for request in requests:
        dispatcher.offer(0, request)
    assert all(dispatcher.cancel(request) for request in requests[:99])
    assert dispatcher.load() == (Load(1, 5, 20), 0)
    for _ in range(99):
        dispatcher.offer(0, ask(5, priority=9))
    work = dispatcher.take(block=False)
    assert [row.request for row in work.launch.rows] == [requests[99]]


def test_X2_cancelling_while_it_runs_leaves_the_mates_alone(desk, ask, told):
    dispatcher = desk()
    requests = [ask(5) for _ in range(3)]
    for request in requests:
        dispatcher.offer(0, request)
    work = dispatcher.take(block=False)
    assert dispatcher.cancel(requests[1])
    assert not dispatcher.cancel(requests[1])
    answer(dispatcher, work)
    assert told.requests == [requests[0], requests[2]]
    assert dispatcher.idle
    assert not dispatcher.cancel(requests[0])


# -- jobs, drain and close -----------------------------------------------------------------------------


def test_jobs_go_first(desk, ask):
    dispatcher, job = desk(), Job()
    dispatcher.offer(0, ask(5))
    dispatcher.post(job)
    assert dispatcher.take(block=False) is job
    assert isinstance(dispatcher.take(block=False), Work)


def test_draining_refuses_newcomers_and_finishes_the_rest(desk, ask, told):
    dispatcher = desk()
    dispatcher.offer(0, ask(5))
    dispatcher.drain()
    with pytest.raises(Closed, match="draining"):
        dispatcher.offer(0, ask(5))
    answer(dispatcher, dispatcher.take(block=False))
    assert told.states() == [State.DONE]
    assert dispatcher.wait_idle(0.0)


def test_X5_close_resolves_everything_once(desk, ask, told):
    dispatcher, job = desk(), Job()
    requests = [ask(5, deadline=200.0) for _ in range(10)]
    for request in requests:
        dispatcher.offer(0, request)
    work = dispatcher.take(block=False)
    dispatcher.post(job)
    dispatcher.close()
    dispatcher.close()
    assert set(told.requests) == set(requests)
    assert told.states() == [State.FAILED] * 10
    assert all(isinstance(request.error, Closed) for request in requests)
    assert isinstance(job.error, Closed)
    answer(dispatcher, work)
    assert len(told.requests) == 10
    assert dispatcher.idle
    assert dispatcher.take(block=True) is None
    with pytest.raises(Closed):
        dispatcher.offer(0, ask(5))
    with pytest.raises(Closed):
        dispatcher.post(Job())


def test_a_close_says_why(desk, ask, told):
    dispatcher = desk()
    dispatcher.offer(0, ask(5))
    dispatcher.close(lambda: Unavailable("the device thread ended"))
    assert str(told.requests[0].error) == "the device thread ended"
    with pytest.raises(Unavailable, match="the device thread ended"):
        dispatcher.offer(0, ask(5))


def test_wait_idle_ends_with_the_last_row_the_timeout_or_the_close(desk, ask, clock):
    dispatcher = desk()
    assert dispatcher.wait_idle(0.0)
    dispatcher.offer(0, ask(5))
    assert not dispatcher.wait_idle(0.0)
    results = []
    waiter = threading.Thread(target=lambda: results.append(dispatcher.wait_idle(5.0)))
    waiter.start()
    clock.advance(5.0)
    waiter.join(10.0)
    while waiter.is_alive():  # it began to wait after the clock moved
        clock.advance(5.0)
        waiter.join(0.1)
    waiter = threading.Thread(target=lambda: results.append(dispatcher.wait_idle(math.inf)))
    waiter.start()
    answer(dispatcher, dispatcher.take(block=False))
    waiter.join(10.0)
    assert results == [False, True]


def test_a_blocked_device_thread_wakes_for_work_and_for_the_close(desk, ask):
    dispatcher, taken = desk(), []

    def device():
        while (work := dispatcher.take(block=True)) is not None:
            taken.append(len(work.launch.rows))
            answer(dispatcher, work)

    thread = threading.Thread(target=device)
    thread.start()
    for _ in range(3):
        dispatcher.offer(0, ask(5))
    assert dispatcher.wait_idle(math.inf)
    dispatcher.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert sum(taken) == 3


def test_the_timer_thread_keeps_deadlines_and_ends_with_the_close(desk, ask, told, clock):
    dispatcher = desk()
    before = threading.active_count()
    dispatcher.start()
    for deadline in (103.0, 101.0, 102.0):
        dispatcher.offer(0, ask(5, deadline=deadline))
    clock.advance(5.0)
    assert dispatcher.wait_idle(math.inf)
    dispatcher.close()
    for thread in threading.enumerate():
        if thread.name == "servax-timer":
            thread.join(10.0)
    assert threading.active_count() == before
    assert told.states() == [State.EXPIRED] * 3


def test_the_timer_is_woken_only_for_an_earlier_deadline(desk, ask, clock, monkeypatch):
    dispatcher, woken = desk(), []
    dispatcher.start()
    notify = dispatcher._timer.cond.notify
    monkeypatch.setattr(dispatcher._timer.cond, "notify", lambda n=1: (woken.append(n), notify(n)))
    for index in range(100):
        request = ask(5, deadline=130.0 + index)
        dispatcher.offer(0, request)
        dispatcher.cancel(request)
    assert len(woken) <= 1  # none if the timer thread had not slept yet
    dispatcher.close()


def test_a_bug_in_the_timer_is_told_to_everybody(desk, ask, told, clock, monkeypatch, caplog):
    dispatcher = desk()
    dispatcher.offer(0, ask(5, deadline=101.0))
    monkeypatch.setattr(dispatcher._deadlines, "due", lambda *_: 1 / 0)
    dispatcher.start()
    assert not dispatcher.wait_idle(math.inf) or told.requests
    assert "the timer thread ended" in str(told.requests[0].error)
    with pytest.raises(Unavailable, match="timer"):
        dispatcher.offer(0, ask(5))


# -- a device that hangs -------------------------------------------------------------------------------


def test_F4_a_device_that_hangs_is_found_out(desk, ask, told, clock):
    dispatcher = desk(stall_s=10.0)
    running = ask(5)
    dispatcher.offer(0, running)
    work = dispatcher.take(block=False)
    waiting = ask(5)
    dispatcher.offer(0, waiting)
    clock.advance(9.0)
    dispatcher.expire()
    assert not dispatcher.stalled
    clock.advance(1.0)
    dispatcher.expire()
    assert dispatcher.stalled
    assert set(told.requests) == {running, waiting}
    assert all(isinstance(request.error, Unavailable) for request in told.requests)
    with pytest.raises(Unavailable, match="every 10 s"):
        dispatcher.offer(0, ask(5))
    answer(dispatcher, work)
    assert not dispatcher.stalled
    dispatcher.offer(0, ask(5))
    assert isinstance(dispatcher.take(block=False), Work)
    assert len(told.requests) == 2


def test_F4_an_idle_device_does_not_stall(desk, ask, clock):
    dispatcher = desk(stall_s=10.0)
    dispatcher.offer(0, ask(5))
    answer(dispatcher, dispatcher.take(block=False))
    clock.advance(1000.0)
    dispatcher.expire()
    assert not dispatcher.stalled


def test_F4_progress_is_no_stall(desk, ask, clock):
    dispatcher = desk(buckets="1x8", stall_s=10.0)
    for _ in range(5):
        dispatcher.offer(0, ask(5))
    flying = dispatcher.take(block=False)
    for _ in range(4):
        following = dispatcher.take(block=False)
        clock.advance(8.0)
        dispatcher.expire()
        assert not dispatcher.stalled
        answer(dispatcher, flying)
        flying = following


# -- several models ------------------------------------------------------------------------------------


def test_two_models_share_the_device_evenly(desk, ask):
    dispatcher = desk(lanes=2, rows=100_000)
    for _ in range(500):
        dispatcher.offer(0, ask(5))
    for _ in range(100):
        dispatcher.offer(1, ask(5))
    lanes = []
    for _ in range(40):
        work = dispatcher.take(block=False)
        lanes.append(work.lane)
        answer(dispatcher, work)
    assert lanes[:40].count(1) == 20


def test_a_light_model_goes_next_and_saves_up_no_credit(desk, ask):
    dispatcher = desk(lanes=2, rows=100_000)
    for _ in range(500):
        dispatcher.offer(0, ask(5))
    for _ in range(30):
        answer(dispatcher, dispatcher.take(block=False))
    for _ in range(40):
        dispatcher.offer(1, ask(5))
    lanes = []
    for _ in range(10):
        work = dispatcher.take(block=False)
        lanes.append(work.lane)
        answer(dispatcher, work)
    assert lanes[0] == 1
    assert lanes.count(1) == 5


def test_each_model_has_its_own_load(desk, ask):
    dispatcher = desk(lanes=2)
    dispatcher.offer(1, ask(5, 5))
    dispatcher.offer(0, ask(5))
    assert dispatcher.load(0) == (Load(1), 0)
    assert dispatcher.load(1) == (Load(2), 0)


def test_turns_are_by_device_time_and_not_by_launches():
    turns = Turns()
    slow, quick = turns.add(), turns.add()
    counts = {slow: 0, quick: 0}
    for _ in range(440):
        lane = turns.order()[0]
        counts[lane] += 1
        turns.charge(lane, 0.010 if lane == slow else 0.001)
    assert counts[quick] == pytest.approx(10 * counts[slow], rel=0.05)


# -- sinks ---------------------------------------------------------------------------------------------


def test_a_sink_that_fails_hurts_no_other(ask, told, caplog):
    class Broken:
        def deliver(self, requests):
            raise RuntimeError("broken")

    bad, good = ask(5), ask(5)
    bad.sink = Broken()
    for request in (bad, good):
        request.move(State.CANCELLED)
    deliver([bad, good])
    assert told.requests == [good]
    assert "could not be handed over" in caplog.text
