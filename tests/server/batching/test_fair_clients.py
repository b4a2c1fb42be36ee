"""Clients that take turns; pure, with time as a number."""

import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.bucketing import CostModel, Grid, Planner
from servax.server import Server
from servax.server.batching.admission import QueueLimits
from servax.server.batching.batcher import Batcher, Launch, Policy
from servax.server.batching.clients import Clients
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher
from servax.server.batching.line import Line
from servax.server.batching.request import State
from servax.server.context import CALL, CallContext
from servax.server.errors import Overloaded
from servax.server.settings import read_settings

MAKERS = [HealthCheck.function_scoped_fixture]  # they hold no state that a test reads


@pytest.fixture
def of(ask):
    """Makes a request of a client."""

    def make(client, *lengths, **more):
        request = ask(*lengths, **more)
        request.client = client
        return request

    return make


@pytest.fixture
def fair(batcher_of):
    """Makes a batcher whose clients take turns."""

    def make(buckets="1x8,4x8", **policy):
        return batcher_of(buckets, fair=True, **policy)

    return make


def run(batcher, now_s=0.0):
    """The clients of the next launch, whose requests begin to run."""
    launch = batcher.next(now_s)
    for row in launch.rows:
        if row.request.state is State.WAITING:
            row.request.move(State.RUNNING)
    return [row.request.client for row in launch.rows]


@pytest.mark.parametrize("buckets", ["1x8,4x8", "1x8,4x8,1x64,4x64"])
@pytest.mark.parametrize("ran", [0, 1, 7])
def test_a_flood_delays_another_client_by_one_batch_at_most(fair, of, buckets, ran):
    batcher = fair(buckets, window=256)
    for place in range(500):
        batcher.add(of("flood", 5 if place % 3 else 7))
    for _ in range(ran):
        run(batcher)
    batcher.add(of("other", 60 if "x64" in buckets else 5))
    assert "other" in [*run(batcher), *run(batcher)]


def test_without_turns_it_waits_for_the_whole_flood(of, batcher_of):
    batcher = batcher_of("1x8,4x8")
    for _ in range(40):
        batcher.add(of("flood", 5))
    batcher.add(of("other", 5))
    for _ in range(10):
        assert run(batcher) == ["flood"] * 4
    assert run(batcher) == ["other"]


def test_a_launch_is_shared_by_the_clients_that_wait(fair, of):
    batcher = fair()
    for client in "aaaaaaaabbbbcc":
        batcher.add(of(client, 5))
    assert [Counter(run(batcher)) for _ in range(2)] == [{"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}]


def test_calls_without_a_client_share_one_turn(fair, of):
    batcher = fair("1x8,2x8")
    for _ in range(4):
        batcher.add(of("", 5))
    batcher.add(of("a", 5))
    assert sorted(run(batcher)) == ["", "a"]


def test_inside_a_client_who_is_due_first_goes_first(fair, of):
    batcher = fair("1x8", max_age_s=50.0)
    dues = {"a": [9.0, 3.0, math.inf, 1.0], "b": [5.0, 2.0]}
    for client, some in dues.items():
        for due in some:
            batcher.add(of(client, 5, deadline=due))
    order = [batcher.next(0.0).rows[0].request for _ in range(2)]
    batcher.add(of("a", 5, deadline=0.5))  # passes rows of its client that were planned
    while isinstance(launch := batcher.next(0.01), Launch):
        order.append(launch.rows[0].request)
    mine = [one.deadline_s for one in order if one.client == "a"]
    assert mine == [1.0, 0.5, 3.0, 9.0, math.inf]
    assert [one.deadline_s for one in order if one.client == "b"] == [2.0, 5.0]
    assert {one.client for one in order[:2]} == {"a", "b"}


def test_priorities_go_before_turns_and_age_before_priorities(fair, of):
    batcher = fair("1x8", max_age_s=1.0)
    for client in "aab":
        batcher.add(of(client, 5, at=0.0, priority=9))
    batcher.add(of("c", 5, at=0.5, priority=1))
    assert run(batcher, 0.5) == ["c"]
    batcher.add(of("c", 5, at=1.5, priority=1))
    assert [run(batcher, 1.5) for _ in range(4)] == [["a"], ["b"], ["a"], ["c"]]


def test_a_queue_older_than_the_age_bound_is_shared_as_well(fair, of):
    batcher = fair(max_age_s=1.0)
    for _ in range(100):
        batcher.add(of("flood", 5, at=0.0))
    batcher.add(of("other", 5, at=20.0))
    assert "other" in run(batcher, 20.0)


def test_turns_hold_inside_weighted_priorities(fair, of):
    batcher = fair(weights={1: 1, 5: 1})
    for _ in range(40):
        batcher.add(of("flood", 5, priority=1))
        batcher.add(of("flood", 5, priority=5))
    run(batcher)
    batcher.add(of("other", 5, priority=5))
    assert "other" in [*run(batcher), *run(batcher)]


def test_ever_new_clients_do_not_keep_a_backlog_from_its_turn(fair, of):
    batcher = fair()
    for _ in range(20):
        batcher.add(of("backlog", 5))
    served = Counter()
    for place in range(200):
        for one in range(4):
            batcher.add(of(f"new {place} {one}", 5))
        served.update(one == "backlog" for one in run(batcher))
    assert served[True] == 20


def test_the_memory_of_clients_is_bounded(fair, of):
    batcher = fair()
    for place in range(5000):
        batcher.add(of(f"client {place}", 5))
        if place % 4 == 3:
            run(batcher)
    queue = batcher._line._queues[5]
    assert len(queue._clients) < 500
    assert len(queue._order) < 500
    assert len(queue._moved) < 500


def test_cancelled_rows_of_clients_are_swept_out(fair, of):
    batcher = fair("1x8")
    batcher.add(kept := of("a", 5))
    for place in range(5000):
        request = of(f"client {place % 700}", 5)
        batcher.add(request)
        request.move(State.CANCELLED)
        batcher.forget(1)
    assert len(batcher._line) < 200
    assert [row.request for row in batcher.next(0.0).rows] == [kept]


def test_less_urgent_requests_come_youngest_first_of_all_clients(fair, of):
    batcher = fair()
    low = [of("ab"[place % 2], 5, at=float(place), priority=9) for place in range(6)]
    for request in low:
        batcher.add(request)
    assert list(batcher.less_urgent(5)) == low[::-1]


# -- shares --------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=MAKERS)
@given(
    lengths=st.lists(st.lists(st.integers(1, 64), min_size=80, max_size=80), min_size=2, max_size=4),
    launches=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    most=st.sampled_from([8, 16, 64]),
)
def test_clients_with_a_backlog_get_the_same_to_within_their_largest_rows(lengths, launches, most, of):
    line = Line(1.0, fair=True)
    largest = {str(client): max(some) for client, some in enumerate(lengths)}
    for client, some in enumerate(lengths):
        for length in some:
            line.add(of(str(client), length))
    served = Counter(dict.fromkeys(largest, 0))
    for count in launches:
        rows = line.front(0.0, most)[:count]
        for row in rows:
            row.taken = True
            served[row.request.client] += row.sizes[0]
        line.charge(rows, 1.0)
        for one in largest:
            for other in largest:
                assert served[one] - served[other] <= largest[one] + largest[other]


@settings(max_examples=60, deadline=None, suppress_health_check=MAKERS)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=5),
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    seconds=st.integers(5, 40),
)
def test_two_floods_get_as_many_rows_whatever_their_requests(lengths, counts, seconds, fair, of):
    batcher = fair("1x8,4x8")
    served, waiting = Counter(), Counter()
    for _ in range(seconds):
        for client in (0, 1):
            while waiting[client] < 40:
                size, count = lengths[client % len(lengths)], counts[client % len(counts)]
                batcher.add(of(str(client), *[size] * count))
                waiting[client] += count
        for client in run(batcher):
            served[client] += lengths[int(client) % len(lengths)]
            waiting[int(client)] -= 1
        assert abs(served["0"] - served["1"]) <= 8 + 8


# -- in the server -------------------------------------------------------------------------------------


@pytest.fixture
def desk():
    """A dispatcher of one model and one row at a time whose clients take turns."""
    clock = ManualClock()
    dispatcher = Dispatcher(clock, QueueLimits(rows=256, fair=True))
    cost = CostModel(lambda bucket: 1.0)
    batcher = Batcher(cost, Policy(fair=True))
    batcher.planner = Planner(Grid.parse("1x8", ("batch", "length")), cost)
    dispatcher.add_lane(batcher)
    return clock, dispatcher


def offer(dispatcher, client, request):
    token = CALL.set(CallContext(client=client))
    try:
        dispatcher.offer(0, request)
    finally:
        CALL.reset(token)
    return request


def step(clock, dispatcher):
    rows = dispatcher.take(block=False).launch.rows
    clock.advance(1.0)
    dispatcher.finish(rows, [[row.index] for row in rows])
    return rows[0].request.client


def test_O2_a_flood_does_not_make_the_door_refuse_another_client(desk, ask):
    clock, dispatcher = desk
    offer(dispatcher, "flood", ask(5))
    step(clock, dispatcher)
    for _ in range(50):
        offer(dispatcher, "flood", ask(5, at=clock.now()))
    with pytest.raises(Overloaded, match="an answer must come within the 10 s"):
        offer(dispatcher, "flood", ask(5, at=clock.now(), deadline=clock.now() + 10.0))
    other = offer(dispatcher, "other", ask(5, at=clock.now(), deadline=clock.now() + 10.0))
    assert "other" in [step(clock, dispatcher), step(clock, dispatcher)]
    assert other.state is State.DONE


def test_the_option_is_read_and_shown(doubling):
    assert read_settings({"queue.fair": True}).config.queue.fair
    assert not read_settings({}).config.queue.fair
    server = Server(doubling(), queue=QueueLimits(fair=True))
    assert server.options["queue.fair"]
    assert isinstance(server.model().batcher._line._queues[5], Clients)
