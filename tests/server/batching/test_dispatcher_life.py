"""Jobs, drain, close and stalls of the dispatcher, driven by hand and by its own threads."""

import math
import threading

import pytest
from servax.server.batching.dispatcher import Work
from servax.server.batching.request import State
from servax.server.errors import Closed, Unavailable


class Job:
    def __init__(self):
        self.error = None

    def fail(self, error):
        self.error = error


# -- jobs, drain and close -----------------------------------------------------------------------------


def test_jobs_go_first(desk, ask):
    dispatcher, job = desk(), Job()
    dispatcher.offer(0, ask(5))
    dispatcher.post(job)
    assert dispatcher.take(block=False) is job
    assert isinstance(dispatcher.take(block=False), Work)


def test_draining_refuses_newcomers_and_finishes_the_rest(desk, ask, told, answer):
    dispatcher = desk()
    dispatcher.offer(0, ask(5))
    dispatcher.drain()
    with pytest.raises(Closed, match="draining"):
        dispatcher.offer(0, ask(5))
    answer(dispatcher, dispatcher.take(block=False))
    assert told.states() == [State.DONE]
    assert dispatcher.wait_idle(0.0)


def test_X5_close_resolves_everything_once(desk, ask, told, answer):
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


def test_wait_idle_ends_with_the_last_row_the_timeout_or_the_close(desk, ask, clock, answer):
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


def test_a_blocked_device_thread_wakes_for_work_and_for_the_close(desk, ask, answer):
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


def test_F4_a_device_that_hangs_is_found_out(desk, ask, told, clock, answer):
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


def test_F4_an_idle_device_does_not_stall(desk, ask, clock, answer):
    dispatcher = desk(stall_s=10.0)
    dispatcher.offer(0, ask(5))
    answer(dispatcher, dispatcher.take(block=False))
    clock.advance(1000.0)
    dispatcher.expire()
    assert not dispatcher.stalled


def test_F4_progress_is_no_stall(desk, ask, clock, answer):
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
