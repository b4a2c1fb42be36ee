"""Callers who leave without having said when, on a clock that the test moves."""

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import CostModel, Grid, Planner
from servax.server.batching.admission import QueueLimits
from servax.server.batching.batcher import Batcher
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher
from servax.server.batching.patience import Patience
from servax.server.batching.request import State
from servax.server.errors import Overloaded

RUN_S, ROWS, PATIENCE_S = 0.02, 4, 0.1


class Crowd:
    """Customers of a device that takes 20 ms for 4 rows: they wait 100 ms, and come again 3 times."""

    def __init__(self, ask, told):
        self.ask, self.told = ask, told
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(self.clock, QueueLimits())
        batcher = Batcher(CostModel(lambda bucket: RUN_S))
        batcher.planner = Planner(Grid.parse("4x10", ("batch", "length")), batcher.cost)
        self.dispatcher.add_lane(batcher)
        self.here, self.back = deque(), deque()
        self.rows_run = self.good = self.refused = 0

    def come(self, tries):
        now_s = self.clock.now()
        request = self.ask(10, at=now_s)
        try:
            self.dispatcher.offer(0, request)
        except Overloaded:
            self.refused += 1
            self.back.append((now_s + PATIENCE_S, tries - 1))
        else:
            self.here.append((now_s + PATIENCE_S, tries - 1, request))

    def step(self, newcomers):
        """One run's time, with customers coming and leaving all through it."""
        work = self.dispatcher.take(block=False)
        for part in range(10):
            now_s = self.clock.now()
            while self.here and self.here[0][0] <= now_s:
                _, tries, request = self.here.popleft()
                if self.dispatcher.cancel(request) and tries:
                    self.back.append((now_s, tries))
            for _ in range(len(self.back)):
                due_s, tries = self.back.popleft()
                if due_s > now_s:
                    self.back.append((due_s, tries))
                elif tries:
                    self.come(tries)
            for _ in range(newcomers * (part + 1) // 10 - newcomers * part // 10):
                self.come(4)
            self.clock.advance(RUN_S / 10)
        if work is not None:
            self.rows_run += len(work.launch.rows)
            before = len(self.told.requests)
            self.dispatcher.finish(work.launch.rows, [[] for _ in work.launch.rows])
            self.good += sum(one.state is State.DONE for one in self.told.requests[before:])

    def run(self, seconds, load):
        good, rows = self.good, self.rows_run
        for _ in range(round(seconds / RUN_S)):
            self.step(round(load * ROWS))
        return self.good - good, self.rows_run - rows


def test_O3_callers_who_leave_untold_are_not_waited_for(ask, told):
    crowd = Crowd(ask, told)
    crowd.run(2.0, 0.5)
    assert crowd.refused == 0
    good, rows = crowd.run(10.0, 5.0)
    assert good >= 0.8 * ROWS * 10.0 / RUN_S
    assert good >= 0.85 * rows, "hardly anything is run in vain"
    crowd.run(1.0, 0.5)
    refused = crowd.refused
    good, _ = crowd.run(2.0, 0.5)
    assert crowd.refused == refused, "normal within a second"
    assert good >= 0.95 * 0.5 * ROWS * 2.0 / RUN_S


def test_callers_who_leave_for_other_reasons_shut_nobody_out(ask, told):
    crowd = Crowd(ask, told)
    crowd.run(1.0, 1.0)
    for _ in range(1000):
        request = ask(10, at=crowd.clock.now())
        crowd.dispatcher.offer(0, request)
        crowd.dispatcher.cancel(request)
    refused = crowd.refused
    crowd.run(1.0, 1.0)
    assert crowd.refused == refused


@given(st.lists(st.one_of(st.just(None), st.floats(0.0, 100.0)), max_size=200))
def test_the_bound_lies_among_the_ages_of_those_who_left(events):
    patience, ages = Patience(), []
    for age_s in events:
        if age_s is None:
            patience.answered()
        else:
            patience.left(age_s, 0.01)
            ages += [age_s] if age_s >= 0.01 else []
        assert 0.0 <= patience.share <= 1.0
        if patience.bound_s != math.inf:
            assert min(ages) * (1 - 1e-9) <= patience.bound_s <= max(ages) * (1 + 1e-9)


def test_answers_lift_the_bound():
    patience = Patience()
    for _ in range(100):
        patience.left(0.1, 0.01)
    assert patience.bound_s == pytest.approx(0.1)
    for _ in range(1000):
        patience.answered()
    assert (patience.bound_s, patience.share) == (math.inf, 0.0)
