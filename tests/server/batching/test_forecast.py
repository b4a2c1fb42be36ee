"""Predictions of when what waits is through, and admission by them, on a clock that the test moves."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import CostModel, Grid, Planner
from servax.server.batching.admission import QueueLimits, check_window
from servax.server.batching.batcher import Batcher
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher
from servax.server.batching.forecast import Forecast
from servax.server.batching.request import State
from servax.server.batching.sinks import LoopSink
from servax.server.context import CALL, CallContext
from servax.server.errors import ConfigError, Overloaded, TooManyRows

RUN_S = 0.02


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def line(clock):
    """A dispatcher over one bucket of 4 rows x 10 that takes 20 ms, and a device that the test moves."""

    class Line:
        def __init__(self, **limits):
            self.dispatcher = Dispatcher(clock, QueueLimits(**limits), stall_s=1e9)
            grid = Grid.parse("4x10", ("batch", "length"))
            batcher = Batcher(CostModel(lambda bucket: RUN_S))
            batcher.planner = Planner(grid, batcher.cost)
            self.lane = self.dispatcher.add_lane(batcher)

        def offer(self, request):
            self.dispatcher.offer(self.lane, request)

        def run(self):
            """Launch one batch, let its time pass, land it."""
            work = self.dispatcher.take(block=False)
            if work is None:
                return 0
            clock.advance(RUN_S)
            self.dispatcher.finish(work.launch.rows, [[] for _ in work.launch.rows])
            return len(work.launch.rows)

    return Line


def test_what_waits_drains_at_the_pace_of_what_ran():
    forecast = Forecast()
    forecast.add_lane()
    assert forecast.drain_s([[0] * 10], 0.0) == 1.0  # nothing known yet
    forecast.launched(0, elements=40, seconds=0.02, now_s=0.0)
    ahead = [[0, 0, 0, 0, 0, 400, 0, 0, 0, 0]]
    assert forecast.drain_s(ahead, 0.02) == pytest.approx(0.2)
    assert forecast.drain_s(ahead, 0.01) == pytest.approx(0.21)  # half of the run is left
    assert forecast.answer_s(0, 5, ahead, 0.02) == pytest.approx(1.25 * 0.22)
    assert forecast.answer_s(0, 4, ahead, 0.02) == pytest.approx(1.25 * 0.02), (
        "what is less urgent is not ahead"
    )


def test_other_lanes_take_their_turns_and_no_more():
    forecast = Forecast()
    for lane in range(2):
        forecast.add_lane()
        forecast.launched(lane, elements=10, seconds=0.01, now_s=0.0)
    ahead = [[0] * 10, [0] * 10]
    ahead[0][5], ahead[1][5] = 100, 100_000
    assert forecast.answer_s(0, 5, ahead, 1.0) == pytest.approx(1.25 * (0.1 + 0.1 + 0.01))


def test_time_lost_between_batches_is_learned_while_the_queue_is_full():
    forecast, ahead = Forecast(), [[0, 0, 0, 0, 0, 40, 0, 0, 0, 0]]
    forecast.add_lane()
    for launch in range(100):
        forecast.launched(0, 40, 0.02, launch * 0.03, more=True)
    assert forecast.drain_s(ahead, 10.0) == pytest.approx(0.03, rel=0.01)
    for launch in range(100):
        forecast.launched(0, 40, 0.02, 20 + launch, more=False)  # an idle device loses nothing
    assert forecast.drain_s(ahead, 300.0) == pytest.approx(0.02, rel=0.01)


def test_what_runs_shorter_than_predicted_leaves_no_backlog_behind():
    forecast, ahead = Forecast(), [[0] * 10]
    forecast.add_lane()
    for launch in range(100):
        forecast.launched(0, 40, 1.0, launch * 0.5, more=True)
        forecast.landed(launch * 0.5 + 0.5, busy=False)
    assert forecast.drain_s(ahead, 50.0) == 0.01
    forecast.launched(0, 40, 1.0, 50.0)
    forecast.landed(50.5, busy=True)  # of two in flight
    assert forecast.drain_s(ahead, 50.5) == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(1e-5, 1.0)), min_size=1, max_size=30),
    st.integers(0, 10_000),
)
def test_predictions_are_finite_and_rise_with_what_waits(launches, waiting):
    forecast = Forecast()
    forecast.add_lane()
    for elements, seconds in launches:
        forecast.launched(0, elements, seconds, 0.0)
    few = [[0, 0, 0, 0, 0, waiting, 0, 0, 0, 0]]
    more = [[0, 0, 0, 0, 0, waiting + 1, 0, 0, 0, 0]]
    assert 0 < forecast.drain_s(few, 0.0) <= forecast.drain_s(more, 0.0) <= 60.0
    assert forecast.answer_s(0, 5, few, 0.0) < forecast.answer_s(0, 5, more, 0.0)


def test_O1_what_would_come_too_late_is_refused_with_the_time_to_retry(line, ask, clock):
    desk = line()
    desk.offer(ask(10))
    desk.run()  # the pace is known now: 20 ms for a run, of one row so far
    for _ in range(8):
        desk.offer(ask(10, 10, 10, 10, at=clock.now()))
        desk.run()
    for _ in range(5):
        desk.offer(ask(10, 10, 10, 10, at=clock.now()))
    with pytest.raises(Overloaded, match="retry after") as info:
        desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 0.05))
    assert info.value.cause == "deadline"
    assert 0.05 < info.value.retry_after_s < 0.4
    desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 5.0))
    desk.offer(ask(10, at=clock.now(), priority=1, deadline=clock.now() + 0.1))


def test_O1_with_nothing_waiting_a_wrong_prediction_shuts_nobody_out(line, ask, clock):
    desk = line()
    desk.offer(ask(10))
    desk.run()
    desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 0.001))


def _overloaded(desk, ask, clock, *, seconds, per_run, patience_s, told, retries=0):
    """Offer `per_run` one-row requests in each run's time; what was refused may come again."""
    begin_s, again, refused = clock.now(), [], []
    launched = 0
    while clock.now() - begin_s < seconds:
        tries = [retries] * per_run + again
        again = []
        for left in tries:
            now_s = clock.now()
            try:
                desk.offer(ask(10, at=now_s, deadline=now_s + patience_s))
            except Overloaded as error:
                refused.append(error)
                if left:
                    again.append(left - 1)
        launched += desk.run()
        desk.dispatcher.expire()
    done = [one for one in told.requests if one.state is State.DONE]
    return len(done), launched, refused


def test_O1_at_ten_times_the_capacity_goodput_stays_and_who_is_admitted_is_in_time(line, ask, clock, told):
    desk = line(rows=64)
    done, launched, refused = _overloaded(
        desk, ask, clock, seconds=10.0, per_run=40, patience_s=0.2, told=told
    )
    capacity = 4 * 10.0 / RUN_S
    assert done >= 0.9 * capacity
    assert launched == done, "nothing late was run"
    assert len(told.requests) - done <= 0.05 * done, "admitted requests keep their deadline"
    assert all(error.retry_after_s <= 1.0 for error in refused)
    while desk.run():
        pass
    assert desk.dispatcher.idle


def test_O3_clients_that_give_up_and_retry_leave_the_goodput(line, ask, clock, told):
    desk = line(rows=64)
    done, launched, _ = _overloaded(
        desk, ask, clock, seconds=10.0, per_run=20, patience_s=0.1, told=told, retries=3
    )
    assert done >= 0.8 * 4 * 10.0 / RUN_S
    assert launched == done
    while desk.run():
        pass
    desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 0.1))
    assert desk.run() == 1, "normal at once"


@pytest.fixture
def as_client():
    """Makes calls come from a client."""
    tokens = []

    def become(name):
        tokens.append(CALL.set(CallContext(client=name)))

    yield become
    for token in reversed(tokens):
        CALL.reset(token)


def test_O2_one_client_cannot_fill_the_queue(line, ask, as_client):
    desk = line(rows=8, client_rows=4)
    as_client("a")
    desk.offer(ask(10, 10, 10))
    with pytest.raises(Overloaded, match="4 rows of one client; 3 wait") as info:
        desk.offer(ask(10, 10))
    assert info.value.cause == "client"
    with pytest.raises(TooManyRows):
        desk.offer(ask(10, 10, 10, 10, 10))
    as_client("b")
    desk.offer(ask(10, 10, 10, 10))
    as_client("a")
    desk.run()
    desk.offer(ask(10, 10))


def test_who_names_no_client_shares_with_nobody(line, ask):
    desk = line(rows=8, client_rows=1)
    desk.offer(ask(10))
    desk.offer(ask(10))


def test_the_books_of_clients_end_empty(line, ask, as_client):
    desk = line(rows=64, client_rows=8)
    as_client("a")
    first, second = ask(10, 10), ask(10)
    desk.offer(first)
    desk.offer(second)
    desk.dispatcher.cancel(second)
    desk.run()
    assert not desk.dispatcher._ledger.clients
    assert not any(map(any, desk.dispatcher._ledger.ahead))


def test_O4_who_gives_way_hears_when_to_come_again(line, ask, told):
    desk = line(rows=4)
    desk.offer(ask(10))
    desk.run()
    desk.offer(ask(10, 10, 10, 10, priority=9))
    desk.offer(ask(10, priority=1))
    (victim,) = [one for one in told.requests if one.state is State.FAILED]
    assert victim.error.cause == "displaced"
    assert 0 < victim.error.retry_after_s < 1.0


def test_B11_a_window_that_no_full_batch_can_end_is_refused(serve, doubling):
    with pytest.raises(ConfigError, match=r"queue.rows 4 below max_batch 8"):
        serve(doubling(batch=8), max_wait_s=0.05, queue=QueueLimits(rows=4), max_request_rows=4)
    check_window(QueueLimits(rows=4), 8, 0.0)
    check_window(QueueLimits(rows=8), 8, 0.05)


def test_with_weights_the_others_go_before_by_their_weight_only():
    forecast = Forecast()
    forecast.add_lane({1: 4.0, 9: 1.0})
    forecast.launched(0, elements=10, seconds=0.01, now_s=0.0)
    ahead = [[0, 1000, 0, 0, 0, 0, 0, 0, 0, 100]]
    assert forecast.answer_s(0, 9, ahead, 1.0) == pytest.approx(1.25 * (0.1 + 0.4 + 0.01))
    assert forecast.answer_s(0, 1, ahead, 1.0) == pytest.approx(1.25 * (1.0 + 0.1 + 0.01))


def test_O1_a_loop_that_lags_leaves_less_of_the_time(line, ask, clock, told):
    desk = line()
    desk.offer(ask(10))
    desk.run()
    desk.offer(ask(10, at=clock.now()))
    desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 0.2))
    told.lag_s = 0.09
    with pytest.raises(Overloaded, match="must come within"):
        desk.offer(ask(10, at=clock.now(), deadline=clock.now() + 0.2))


def test_O1_a_sink_knows_how_far_its_loop_is_behind(told):
    async def measure():
        loop = asyncio.get_running_loop()
        sink = LoopSink(loop)
        assert sink.lag_s == 0.0
        sink.deliver([])
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + 0.02:
            pass
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return sink.lag_s

    assert asyncio.run(measure()) >= 0.02
