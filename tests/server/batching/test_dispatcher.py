"""The queue and the states of requests, driven by hand: no threads, no device, no sleeping."""

import pytest
from servax.server.batching.admission import Load
from servax.server.batching.request import State
from servax.server.batching.sinks import deliver
from servax.server.errors import DeadlineExceeded, ModelError, Overloaded, TooManyRows


def test_a_request_goes_through(desk, ask, told, answer):
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


def test_B8_a_split_request_is_answered_once_all_pieces_are(desk, ask, told, answer):
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


def test_B8_a_failing_piece_drops_those_not_launched_and_nobody_else(desk, ask, told, answer):
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


def test_O2_rows_that_were_launched_make_room(desk, ask, answer):
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


def test_a_running_request_expires_too_and_its_answer_is_dropped(desk, ask, told, clock, answer):
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


def test_X2_cancelling_while_it_runs_leaves_the_mates_alone(desk, ask, told, answer):
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
