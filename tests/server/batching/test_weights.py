"""Priorities with weights, and the order inside a priority; pure, with time as a number."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.server.batching.batcher import Launch, Policy
from servax.server.batching.faults import FaultPolicy
from servax.server.batching.request import State
from servax.server.batching.shares import parse_weights
from servax.server.batching.waiting import Row, Waiting
from servax.server.errors import ConfigError
from servax.server.settings import read_settings

COST = 1e-4
MAKERS = [HealthCheck.function_scoped_fixture]  # they hold no state that a test reads


def linear(bucket):
    return COST + 1e-5 * bucket.elements


def loaded(batcher, ask, lengths, seconds, *, busy=None, settled=None):
    """Device seconds by priority under full load: each of them always has rows waiting."""
    now_s, used, waiting = 0.0, defaultdict(float), Counter()
    while now_s < seconds:
        for priority, length in lengths.items():
            while waiting[priority] < 40 and (busy is None or busy(priority, now_s)):
                batcher.add(ask(length, at=now_s, priority=priority))
                waiting[priority] += 1
        launch = batcher.next(now_s)
        assert isinstance(launch, Launch)
        cost_s = linear(launch.bucket)
        total = sum(row.sizes[0] for row in launch.rows)
        for row in launch.rows:
            used[row.request.priority] += cost_s * row.sizes[0] / total
            waiting[row.request.priority] -= 1
            row.request.move(State.RUNNING)
        now_s += cost_s
    return used


@settings(max_examples=20, deadline=None, suppress_health_check=MAKERS)
@given(data=st.data())
def test_shares_of_the_device_are_in_the_ratio_of_the_weights(data, ask, batcher_of):
    priorities = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True))
    weights = {priority: data.draw(st.sampled_from([1, 2, 4])) for priority in priorities}
    lengths = {priority: data.draw(st.integers(1, 64)) for priority in priorities}
    batcher = batcher_of("1x8,4x8,8x8,1x64,4x64", linear, weights=weights, window=32)
    used = loaded(batcher, ask, lengths, 1.0)
    each = {priority: used[priority] / weight for priority, weight in weights.items()}
    assert max(each.values()) <= 1.25 * min(each.values())


def test_a_class_of_weight_four_gets_four_times_the_device(ask, batcher_of):
    batcher = batcher_of("1x8,4x8,8x8", linear, weights={1: 4, 9: 1})
    used = loaded(batcher, ask, {1: 8, 9: 8}, 2.0)
    assert used[1] / used[9] == pytest.approx(4, rel=0.1)


def test_weights_hold_in_a_queue_older_than_the_age_bound(ask, batcher_of):
    batcher = batcher_of("4x8", linear, weights={1: 4, 9: 1}, max_age_s=1e-4)
    used = loaded(batcher, ask, {1: 8, 9: 8}, 2.0)
    assert used[1] / used[9] == pytest.approx(4, rel=0.1)


def test_what_one_class_does_not_use_goes_to_the_others_and_is_no_credit(ask, batcher_of):
    batcher = batcher_of("4x8", linear, weights={1: 1, 5: 1})
    alone = loaded(batcher, ask, {1: 8, 5: 8}, 1.0, busy=lambda priority, now_s: priority == 5)
    assert alone[5] == pytest.approx(1.0, rel=0.01)
    both = loaded(batcher, ask, {1: 8, 5: 8}, 1.0)
    assert both[1] == pytest.approx(both[5], rel=0.1)


def test_the_age_bound_holds_for_a_class_of_small_weight(ask, batcher_of):
    batcher = batcher_of("2x8", linear, weights={1: 1e6, 9: 1e-6}, max_age_s=1.0)
    batcher._line._shares._tags[9] = 1e9  # it has used up its share for years
    old = ask(8, at=0.0, priority=9)
    batcher.add(old)
    now_s = 0.0
    while old.state is State.WAITING:
        for _ in range(3):
            batcher.add(ask(8, at=now_s, priority=1))
        for row in batcher.next(now_s).rows:
            row.request.move(State.RUNNING)
        now_s += 0.05
    assert 1.0 <= now_s <= 1.0 + 2 * 0.05


def test_small_weights_fill_rows_that_would_be_padding(ask, batcher_of):
    batcher = batcher_of("4x8", linear, weights={1: 100, 9: 1})
    for priority in (9, 9, 1):
        batcher.add(ask(5, priority=priority))
    assert sorted(row.request.priority for row in batcher.next(0.0).rows) == [1, 9, 9]


@pytest.mark.parametrize("weights", [None, {1: 2, 5: 1}])
def test_inside_a_class_who_is_due_first_goes_first(ask, batcher_of, weights):
    batcher = batcher_of("1x8", linear, weights=weights, max_age_s=50.0)
    dues = {5: [9.0, 3.0, math.inf, 1.0, 3.0], 1: [math.inf, 2.0]}
    asked = [(priority, due) for priority, some in dues.items() for due in some]
    for place, (priority, due) in enumerate(asked):
        batcher.add(ask(5, at=0.001 * place, priority=priority, deadline=due))
    order = []
    while isinstance(launch := batcher.next(0.01), Launch):
        order += [row.request for row in launch.rows]
    for priority, some in dues.items():
        assert [one.deadline_s for one in order if one.priority == priority] == sorted(some)
    if weights is None:
        assert [one.priority for one in order[:2]] == [1, 1]


def test_a_due_row_passes_a_planned_front_of_its_own_class(ask, batcher_of):
    batcher = batcher_of("1x8,8x8", linear, window=16)
    for _ in range(64):
        batcher.add(ask(5))
    assert batcher.next(0.0).reason == "full"
    pressing = ask(5, deadline=0.5)
    batcher.add(pressing)
    assert batcher.next(0.0).rows[0].request is pressing


def test_a_due_row_passes_a_planned_front_with_nobody_behind_it(ask, batcher_of):
    batcher = batcher_of("1x8", linear, max_age_s=50.0)
    for _ in range(5):
        batcher.add(ask(5, deadline=9.0))
    batcher.next(0.0)
    pressing, later = ask(5, deadline=0.5), ask(5, deadline=20.0)
    batcher.add(later)
    batcher.add(pressing)
    assert batcher.next(0.0).rows[0].request is pressing
    for _ in range(4):
        assert batcher.next(0.0).rows[0].request.deadline_s == 9.0
    assert batcher.next(0.0).rows[0].request is later


moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([1.0, 2.0, 3.0, math.inf]), st.integers(1, 3)),
        st.tuples(st.just("pop"), st.integers(1, 5), st.integers(0, 5)),
        st.tuples(st.just("keep"), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None, suppress_health_check=MAKERS)
@given(moves=moves, age_s=st.sampled_from([-1.0, 5.0, 1e9]))
def test_the_queue_of_a_class_equals_a_sorted_list(moves, age_s, ask):
    """Against a list that is sorted at every step; some rows that were taken are put back."""
    queue, model, now_s, serial = Waiting(), [], 0.0, {}

    def key(row):
        request = row.request
        aged = request.arrived_s <= now_s - age_s if age_s > 0 else False
        return (0, request.arrived_s, serial[row]) if aged else (1, request.deadline_s, serial[row])

    for move in moves:
        now_s += 1.0
        if move[0] == "add":
            request = ask(*[5] * move[2], at=now_s, deadline=now_s + move[1])
            rows = [Row(request, index) for index in range(move[2])]
            serial |= {row: len(serial) + index for index, row in enumerate(rows)}
            queue.extend(rows)
            model += rows
        elif move[0] == "pop":
            taken = []
            for _ in range(min(move[1], len(model))):
                best = min(model, key=key)
                assert queue.head(now_s - age_s if age_s > 0 else -1.0) is best
                taken.append(queue.pop(now_s - age_s if age_s > 0 else -1.0))
                assert taken[-1] is best
                model.remove(best)
            for row in reversed(taken[-move[2] :] if move[2] else []):
                queue.put_back(row)
                model.append(row)
        else:
            model = [row for row in model if serial[row] % move[1] == 0]
            left = set(model)
            queue.keep(row for row in queue if row in left)
        assert len(queue) == len(model)
        arrivals = [row.request.arrived_s for row in queue]
        assert set(queue) == set(model)
        assert arrivals == sorted(arrivals)


def test_the_queue_forgets_what_passed_and_was_taken(ask):
    queue = Waiting()
    queue.extend([Row(ask(5), 0)])
    for place in range(1000):
        queue.extend([Row(ask(5, at=float(place), deadline=1e6 - place), 0)])
        queue.pop(-1.0)
    assert len(queue) == 1
    assert len(queue._by_arrival) < 200


@pytest.mark.parametrize(
    ("text", "weights"), [("strict", None), ("1=8, 5=2,9=0.5", {1: 8.0, 5: 2.0, 9: 0.5})]
)
def test_weights_can_be_written(text, weights):
    assert parse_weights(text) == weights


@pytest.mark.parametrize("text", ["", "fair", "1", "0=1", "10=1", "1=0", "1=-2", "1=nan", "1=inf", "x=1"])
def test_weights_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="weights"):
        parse_weights(text)


def test_a_policy_checks_its_weights():
    with pytest.raises(ConfigError, match="got -1 for 3"):
        Policy(weights={3: -1})


def test_the_options_in_force_are_shown(serve, doubling):
    server, _ = serve(doubling(), priority_weights={1: 4, 9: 0.5}, faults=FaultPolicy(retries=5))
    assert server.options["priorities"] == "1=4,9=0.5"
    assert server.options["max_age_s"] == 1.0
    assert server.options["faults.retries"] == 5
    assert server.model().batcher.policy.weights == {1: 4, 9: 0.5}


def test_the_options_are_read_and_checked():
    config = read_settings({"priorities": "1=4", "faults.retries": 0, "replicas": 2}).config
    assert (config.priorities, config.faults.retries, config.replicas) == ("1=4", 0, 2)
    for path, value in (("priorities", "fair"), ("faults.backoff_s", 99), ("replicas", -1)):
        with pytest.raises(ConfigError, match=path.replace("_s", "").replace(".", r"[.]")):
            read_settings({path: value})


def test_more_replicas_than_devices_are_refused():
    from servax.server.cli.wiring import _replicas

    assert _replicas(1, []) is None
    with pytest.raises(ConfigError, match="got 99"):
        _replicas(99, [])
