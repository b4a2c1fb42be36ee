"""Random walks over the dispatcher and the batcher together, against a model of a few lines."""

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from servax.bucketing import CostModel, Grid, Planner
from servax.server.batching.admission import QueueLimits
from servax.server.batching.batcher import Batcher, Policy
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher, Work
from servax.server.batching.request import Request, State
from servax.server.errors import Closed, ModelError, Overloaded, TooManyRows, Unavailable

ROWS, ELEMENTS = 24, 600
MAX_AGE_S = 2.0
FINAL = {State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED}


class Machine(RuleBasedStateMachine):
    """Callers, a device that may hold several batches, a clock and two models."""

    lag_s = 0.0  # as a sink

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(self.clock, QueueLimits(ROWS, ELEMENTS), stall_s=60.0)
        grid = Grid.parse("1x8,4x8,8x8,1x64,4x64", ("batch", "length"))
        for max_wait_s in (0.0, 0.2):
            cost = CostModel(lambda bucket: 1e-3 + 1e-5 * bucket.elements)
            batcher = Batcher(cost, Policy(max_wait_s=max_wait_s, max_age_s=MAX_AGE_S, window=16))
            batcher.planner = Planner(grid, cost, window=16)
            self.dispatcher.add_lane(batcher)
        self.admitted, self.refused, self.cancelled = [], 0, set()
        self.told: list[Request] = []
        self.flying: list[Work] = []
        self.launched: list[tuple[Request, int]] = []
        self.closed = self.draining = False

    def deliver(self, requests):
        """This machine is the sink."""
        for request in requests:
            assert request.state in FINAL - {State.CANCELLED}
            assert request not in self.told
            self.told.append(request)

    @rule(
        lane=st.integers(0, 1),
        sizes=st.lists(st.integers(1, 64), min_size=1, max_size=10),
        priority=st.sampled_from([1, 5, 5, 5, 9]),
        patience_s=st.sampled_from([math.inf, math.inf, 0.1, 1.0, 5.0]),
    )
    def offer(self, lane, sizes, priority, patience_s):
        now_s = self.clock.now()
        request = Request(
            [{"x": np.zeros(n, np.int8)} for n in sizes],
            [(n,) for n in sizes],
            arrived_s=now_s,
            sink=self,
            priority=priority,
            deadline_s=now_s + patience_s,
        )
        before = self.dispatcher.load()
        try:
            self.dispatcher.offer(lane, request)
        except Overloaded:
            assert not self.draining
            assert self.dispatcher.load() == before
            rows, elements = before[0].rows + len(sizes), before[0].elements + sum(sizes)
            assert rows > ROWS or elements > ELEMENTS
        except TooManyRows:
            assert sum(sizes) > ELEMENTS
            assert self.dispatcher.load() == before
        except Closed:
            assert self.draining
        except Unavailable:
            assert self.dispatcher.stalled
        else:
            assert not self.draining
            self.admitted.append(request)

    @precondition(lambda self: len(self.flying) < 3)
    @rule()
    def take(self):
        work = self.dispatcher.take(block=False)
        if work is None:
            return
        # First of all, so that a failure below is not covered up by one in teardown.
        self.flying.append(work)
        now_s, rows = self.clock.now(), work.launch.rows
        assert not self.closed
        assert 1 <= len(rows) <= work.launch.bucket.rows
        for row in rows:
            assert row.request.lane == work.lane
            assert not row.request.over
            assert row.request.deadline_s > now_s
            assert work.launch.bucket.holds(1, row.sizes)
            assert (row.request, row.index) not in self.launched
        self._check_order(work, now_s)
        self.launched += [(row.request, row.index) for row in rows]

    def _check_order(self, work, now_s):
        """No row of equal priority and size that came earlier and is due no later is left behind."""
        chosen = {(row.request, row.index) for row in work.launch.rows}
        last = {}
        for row in work.launch.rows:
            if row.request.deadline_s < now_s + 0.1:
                continue  # a pressing deadline goes before equals
            key = (row.request.priority, row.sizes)
            last.setdefault(key, []).append((self.admitted.index(row.request), row.request.deadline_s))
        for place, request in enumerate(self.admitted):
            if request.over or request.lane != work.lane or request.deadline_s <= now_s:
                continue
            for index, size in enumerate(request.sizes):
                later = last.get((request.priority, size), ())
                passed = any(place < other and request.deadline_s <= due_s for other, due_s in later)
                if passed and (request, index) not in self.launched:
                    assert (request, index) in chosen

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data):
        work = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.dispatcher.finish(work.launch.rows, [[row.sizes, row.index] for row in work.launch.rows])

    @precondition(lambda self: self.flying)
    @rule(cut=st.integers(0, 8))
    def fail_some(self, cut):
        rows = self.flying.pop(0).launch.rows
        self.dispatcher.fail(rows[:cut], lambda: ModelError("bad"))
        self.dispatcher.finish(rows[cut:], [[row.sizes, row.index] for row in rows[cut:]])

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.admitted))
        over = request.over
        assert self.dispatcher.cancel(request) == (not over)
        if not over:
            self.cancelled.add(request)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 7.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)
        self.dispatcher.expire()

    @rule(really=st.integers(0, 9))
    def drain(self, really):
        if really == 7:
            self.dispatcher.drain()
            self.draining = True

    @rule(really=st.integers(0, 19))
    def close(self, really):
        if really == 7:
            self.dispatcher.close()
            self.draining = self.closed = True
            assert all(request.over for request in self.admitted)

    @invariant()
    def books_are_right(self):
        load, running = self.dispatcher.load()
        waiting = [
            (request, index)
            for request in self.admitted
            if not request.over
            for index in range(len(request.items))
            if (request, index) not in self.launched
        ]
        assert load.rows == len(waiting) <= ROWS
        assert load.elements == sum(request.sizes[index][0] for request, index in waiting) <= ELEMENTS
        assert load.bytes == sum(request.nbytes for request in {request for request, _ in waiting})
        assert running == sum(len(work.launch.rows) for work in self.flying)
        lanes = [self.dispatcher.load(lane) for lane in (0, 1)]
        assert (sum(one.rows for one, _ in lanes), sum(count for _, count in lanes)) == (load.rows, running)
        live = [request for request in self.admitted if not request.over]
        assert self.dispatcher.idle == (not live and not self.flying)

    @invariant()
    def everybody_is_told_once_and_the_truth(self):
        over = {request for request in self.admitted if request.over}
        assert over == set(self.told) | self.cancelled
        assert len(over) == len(self.told) + len(self.cancelled)
        for request in self.told:
            if request.state is State.DONE:
                assert request.results == [[size, index] for index, size in enumerate(request.sizes)]
            else:
                assert request.error is not None

    def teardown(self):
        """Whatever happened, the rest is answered and the books close at zero."""
        self.draining or self.closed or self.dispatcher.drain()
        for _ in range(1000):
            self.dispatcher.expire()
            work = self.dispatcher.take(block=False)
            if work is not None:
                self.launched += [(row.request, row.index) for row in work.launch.rows]
                self.flying.append(work)
            if self.flying:
                self.finish_first()
            elif work is None and not self.dispatcher.idle:
                self.clock.advance(0.2)
        assert self.dispatcher.idle
        self.books_are_right()
        self.everybody_is_told_once_and_the_truth()

    def finish_first(self):
        rows = self.flying.pop(0).launch.rows
        self.dispatcher.finish(rows, [[row.sizes, row.index] for row in rows])


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_dispatcher_machine = Machine.TestCase
