"""When an idle device waits for more rows; pure, with time as a number."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.bucketing import CostModel, Grid, Planner
from servax.bucketing.packed_plan import PackedPlanner
from servax.server import Server
from servax.server.batching.admission import QueueLimits
from servax.server.batching.batcher import Batcher, Launch, Policy
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher
from servax.server.batching.fake_device import FakeDevice
from servax.server.batching.request import State
from servax.server.errors import ConfigError
from servax.server.settings import read_settings

GRID = "1x8,2x8,4x8,8x8,16x8"
BOUND_S = 4e-3
AGAIN_S = 0.3e-3
MAKERS = [HealthCheck.function_scoped_fixture]  # they hold no state that a test reads


def flat(bucket):
    return 2e-3 + 2e-5 * bucket.rows


def linear(bucket):
    return 1e-3 * bucket.rows


@pytest.fixture
def adaptive(batcher_of):
    """Makes a batcher that waits if it pays."""

    def make(cost=flat, buckets=GRID, **policy):
        return batcher_of(buckets, cost, **{"max_wait_s": BOUND_S, "wait": "adaptive"} | policy)

    return make


class Loop:
    """Clients that ask again when they are answered, on a device in simulated time."""

    def __init__(self, batcher, ask, clients, again_s=AGAIN_S):
        self.batcher, self.ask, self.again_s = batcher, ask, again_s
        self.now_s, self.launches, self.taken = 0.0, [], []
        self.upcoming = [1e-5 * one for one in range(clients)]

    def come(self, until_s):
        while self.upcoming and self.upcoming[0] <= until_s:
            self.batcher.add(self.ask(5, at=heapq.heappop(self.upcoming)))

    def run(self, launches):
        """Latencies of the rows of so many launches."""
        begin = len(self.taken)
        for _ in range(launches):
            self.come(self.now_s)
            while not isinstance(launch := self.batcher.next(self.now_s), Launch):
                assert launch > self.now_s
                self.now_s = min(launch, self.upcoming[0] if self.upcoming else math.inf)
                self.come(self.now_s)
            self.now_s += self.batcher.cost.seconds(launch.bucket)
            self.come(self.now_s - 1e-12)
            self.launches.append(launch)
            for place, row in enumerate(launch.rows):
                self.taken.append(self.now_s - row.request.arrived_s)
                heapq.heappush(self.upcoming, self.now_s + self.again_s + 1e-5 * place)
        return self.taken[begin:]


@pytest.mark.parametrize("clients", [2, 5, 8])
def test_it_learns_to_wait_for_clients_that_come_back_and_for_no_other(adaptive, ask, clients):
    loop = Loop(adaptive(), ask, clients)
    loop.run(30)
    taken = loop.run(20)
    assert {len(one.rows) for one in loop.launches[-20:]} == {clients}
    # They come back within 0.4 ms; a wait for one more would show.
    assert max(taken) < 2.0e-3 + 0.32e-3 + 2e-4
    never = Loop(adaptive(max_wait_s=0.0, wait="fixed"), ask, clients)
    never.run(30)
    assert sum(taken) / len(taken) < 0.7 * sum(got := never.run(20)) / len(got)


def test_it_follows_when_clients_join_and_leave(adaptive, ask):
    loop = Loop(adaptive(), ask, 8)
    loop.run(30)
    loop.upcoming += [loop.now_s + 2e-5] * 4
    heapq.heapify(loop.upcoming)
    loop.run(60)
    assert len(loop.launches[-1].rows) == 12
    del loop.upcoming[-6:]
    loop.run(60)
    assert len(loop.launches[-1].rows) == 6


@pytest.mark.parametrize("clients", [1, 2, 8])
def test_nothing_saved_is_nothing_waited_for(adaptive, ask, clients):
    """Where twice the rows take twice the time all goes as without a wait."""
    loop, never = (
        Loop(adaptive(linear), ask, clients),
        Loop(adaptive(linear, wait="fixed", max_wait_s=0), ask, clients),
    )
    assert loop.run(100) == never.run(100)


def test_runs_longer_than_the_bound_are_joined_too(adaptive, ask):
    """A row that came during the run before has waited longer than the bound; the device has not."""
    loop = Loop(adaptive(max_wait_s=1e-3), ask, 4)
    loop.run(30)
    assert {len(one.rows) for one in loop.launches[-10:]} == {4}


def test_rare_rows_never_wait(adaptive, ask):
    batcher = adaptive()
    for place in range(100):
        batcher.add(ask(5, at=float(place)))
        launch = batcher.next(float(place))
        assert (launch.reason, len(launch.rows)) == ("idle", 1)


def test_after_a_burst_rare_rows_wait_a_few_times_at_most(adaptive, ask):
    batcher = adaptive()
    Loop(batcher, ask, 8).run(50)
    while isinstance(batcher.next(1.0), Launch):
        pass
    waited = 0
    for place in range(10, 40):
        batcher.add(ask(5, at=float(place)))
        answer = batcher.next(float(place))
        if not isinstance(answer, Launch):
            assert place < answer <= place + BOUND_S
            assert isinstance(batcher.next(answer), Launch)
            waited += 1
    assert waited <= 6


def primed(batcher, ask, again_s=AGAIN_S):
    """When a batcher is at rest that has learned to expect a second row soon after a first."""
    loop = Loop(batcher, ask, 2, again_s)
    loop.run(30)
    return loop.now_s


def test_a_wait_ends_when_the_device_gives_up_hope(adaptive, ask):
    batcher = adaptive()
    now_s = primed(batcher, ask)
    batcher.add(ask(5, at=now_s))
    until_s = batcher.next(now_s)
    assert now_s < until_s < now_s + BOUND_S
    assert batcher.next(until_s - 1e-6) == pytest.approx(until_s)
    launch = batcher.next(until_s)
    assert (launch.reason, len(launch.rows)) == ("idle", 1)


def test_the_bound_ends_a_wait(adaptive, ask):
    batcher = adaptive(max_wait_s=2e-4)
    now_s = primed(batcher, ask, again_s=1e-4)
    batcher.add(ask(5, at=now_s))
    assert batcher.next(now_s) == pytest.approx(now_s + 2e-4)
    assert batcher.next(now_s + 2e-4 + 1e-9).reason == "window"


def test_a_deadline_ends_a_wait_in_time_for_the_run(adaptive, ask):
    batcher = adaptive()
    now_s = primed(batcher, ask)
    batcher.add(ask(5, at=now_s, deadline=now_s + 2.02e-3 + 2e-4))
    assert batcher.next(now_s) == pytest.approx(now_s + 2e-4)
    assert batcher.next(now_s + 2e-4 + 1e-9).reason == "deadline"


def test_a_full_batch_does_not_wait_for_more(adaptive, ask):
    batcher = adaptive(buckets="1x8,2x8")
    now_s = primed(batcher, ask)
    batcher.add(ask(5, 5, at=now_s))
    assert batcher.next(now_s).reason == "full"


def test_rows_of_two_runs_do_not_wait(adaptive, ask):
    """While one runs others gather for the other."""
    batcher = adaptive(lambda b: 1e-3 + 1e-4 * b.elements, buckets="1x8,2x8,4x8,1x64,2x64,4x64")
    now_s = primed(batcher, ask)
    batcher.add(ask(5, at=now_s))
    batcher.add(ask(60, at=now_s))
    assert batcher.next(now_s).reason == "idle"


def test_the_dispatcher_sleeps_until_then(ask, told):
    clock = ManualClock()
    dispatcher = Dispatcher(clock, QueueLimits())
    cost = CostModel(flat)
    batcher = Batcher(cost, Policy(max_wait_s=BOUND_S, wait="adaptive"))
    batcher.planner = Planner(Grid.parse(GRID, ("batch", "length")), cost)
    clock.advance(primed(batcher, ask))
    lane = dispatcher.add_lane(batcher)
    request = ask(5, at=clock.now())
    dispatcher.offer(lane, request)
    assert dispatcher.take(block=False) is None
    clock.advance(BOUND_S)
    work = dispatcher.take(block=False)
    dispatcher.finish(work.launch.rows, [[row.index] for row in work.launch.rows])
    assert told.states() == [State.DONE]


def test_packed_rows_wait_too(ask):
    cost = CostModel(lambda bucket: 2e-3 + 1e-6 * bucket.elements)
    batcher = Batcher(cost, Policy(max_wait_s=BOUND_S, wait="adaptive"))
    grid = Grid.explicit(("batch", "length"), [(1, 16), (1, 32), (1, 64), (2, 64)])
    batcher.planner = PackedPlanner(grid, cost, max_segments=8)
    now_s = primed(batcher, ask)
    batcher.add(ask(5, at=now_s))
    assert now_s < batcher.next(now_s) < now_s + BOUND_S


steps = st.lists(
    st.tuples(
        st.floats(0.0, 0.02),
        st.lists(st.integers(1, 64), min_size=1, max_size=6),
        st.sampled_from([math.inf, math.inf, 0.05]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=MAKERS)
@given(steps=steps, fixed_s=st.sampled_from([0.0, 1e-3, 5e-3]), row_s=st.sampled_from([0.0, 1e-5, 1e-3]))
def test_waits_keep_their_bound_and_every_row_is_launched(steps, fixed_s, row_s, ask, batcher_of):
    batcher = batcher_of(
        "1x8,4x8,6x16,1x64,3x64,8x64",
        lambda bucket: fixed_s + row_s * bucket.rows + 1e-7 * bucket.elements,
        max_wait_s=BOUND_S,
        wait="adaptive",
    )
    arrivals, at = [], 0.0
    for gap_s, lengths, patience_s in steps:
        at += gap_s
        arrivals.append(ask(*lengths, at=at, deadline=at + patience_s))
    left = sum(len(one.items) for one in arrivals)
    upcoming, now_s, free_s = list(reversed(arrivals)), 0.0, 0.0
    for _ in range(10_000):
        while upcoming and upcoming[-1].arrived_s <= now_s:
            batcher.add(upcoming.pop())
        answer = batcher.next(now_s)
        if isinstance(answer, Launch):
            oldest_s = min(row.request.arrived_s for row in answer.rows)
            assert now_s <= max(free_s, oldest_s) + BOUND_S + 1e-9
            assert answer.reason in ("full", "window", "deadline", "idle")
            left -= len(answer.rows)
            now_s = free_s = now_s + batcher.cost.seconds(answer.bucket)
            continue
        assert answer > now_s
        now_s = min(answer, upcoming[-1].arrived_s if upcoming else math.inf)
        if now_s == math.inf:
            break
    late = sum(not row.taken for row in batcher.clear())
    assert late == 0
    assert left <= sum(len(one.items) for one in arrivals if one.deadline_s < math.inf)


def test_a_server_that_waits_answers_and_tells_why_it_started(doubling):
    records = []
    with Server(
        doubling(),
        wait="adaptive",
        max_wait_s=BOUND_S,
        compile_program=FakeDevice().compile,
        on_batch=records.append,
    ) as server:
        for _ in range(20):
            server(x=np.ones(5, np.float32))
    assert sum(one.rows for one in records) == 20
    assert {one.reason for one in records} <= {"idle", "full", "window"}


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"wait": "sometimes"}, {"wait": "adaptive"}])
def test_a_wait_is_one_of_two_and_has_a_bound(bad):
    with pytest.raises(ConfigError, match=r"'fixed' or 'adaptive'|needs a bound"):
        Policy(**bad)


def test_the_wait_is_read_checked_and_shown(doubling):
    config = read_settings({"wait": "adaptive", "max_wait_ms": 3.0}).config
    assert config.wait == "adaptive"
    with pytest.raises(ConfigError, match="max_wait_ms"):
        read_settings({"wait": "adaptive"})
    server = Server(doubling(), wait="adaptive", max_wait_s=BOUND_S)
    assert server.options["wait"] == "adaptive"
    assert server.model().batcher.policy.wait == "adaptive"
