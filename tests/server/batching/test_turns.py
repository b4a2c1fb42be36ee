"""Several models on one device."""

import pytest
from servax.server.batching.admission import Load
from servax.server.batching.turns import Turns


def lanes_of(dispatcher, answer, count):
    """The lanes whose turn it is in so many launches, each answered before the next."""
    lanes = []
    for _ in range(count):
        work = dispatcher.take(block=False)
        lanes.append(work.lane)
        answer(dispatcher, work)
    return lanes


def test_two_models_share_the_device_evenly(desk, ask, answer):
    dispatcher = desk(lanes=2, rows=100_000)
    for _ in range(500):
        dispatcher.offer(0, ask(5))
    for _ in range(100):
        dispatcher.offer(1, ask(5))
    lanes = lanes_of(dispatcher, answer, 40)
    assert lanes.count(1) == 20


def test_a_light_model_goes_next_and_saves_up_no_credit(desk, ask, answer):
    dispatcher = desk(lanes=2, rows=100_000)
    for _ in range(500):
        dispatcher.offer(0, ask(5))
    for _ in range(30):
        answer(dispatcher, dispatcher.take(block=False))
    for _ in range(40):
        dispatcher.offer(1, ask(5))
    lanes = lanes_of(dispatcher, answer, 10)
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
