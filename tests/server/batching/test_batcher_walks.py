"""Random walks over the batcher under every policy; pure, with time as a number."""

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.server.batching.batcher import Launch
from servax.server.batching.request import State

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.lists(st.integers(1, 64), min_size=1, max_size=12),
            st.sampled_from("abc"),
            st.sampled_from([1, 2, 5, 5, 8, 9]),
            st.sampled_from([math.inf, math.inf, 0.5, 3.0]),
        ),
        st.tuples(st.just("next")),
        st.tuples(st.just("wait"), st.floats(0.001, 2.0)),
        st.tuples(st.just("cancel"), st.integers(0, 1000)),
    ),
    max_size=60,
)
POLICIES = [
    {},
    {"max_wait_s": 0.3},
    {"fair": True},
    {"fair": True, "max_wait_s": 0.3},
    {"fair": True, "weights": {1: 4}},
    {"fair": True, "max_wait_s": 0.3, "wait": "adaptive"},
]


class Walk:
    """A batcher, the requests it was given, and their rows in the order in which they were launched."""

    def __init__(self, batcher, ask):
        self.batcher, self.ask = batcher, ask
        self.now_s, self.requests, self.taken = 0.0, [], []

    def add(self, lengths, client, priority, patience_s):
        due_s = self.now_s + patience_s
        self.requests.append(self.ask(*lengths, at=self.now_s, priority=priority, deadline=due_s))
        self.requests[-1].client = client
        self.batcher.add(self.requests[-1])

    def wait(self, seconds):
        self.now_s += seconds

    def cancel(self, number):
        if self.requests and not (request := self.requests[number % len(self.requests)]).over:
            request.move(State.CANCELLED)
            self.batcher.forget(len(request.items))

    def next(self):
        """Launch what is due; until when to wait, if nothing is."""
        launch = self.batcher.next(self.now_s)
        if not isinstance(launch, Launch):
            assert launch > self.now_s
            return launch
        assert 1 <= len(launch.rows) <= launch.bucket.rows
        assert launch.reason in ("full", "window", "deadline", "idle")
        for row in launch.rows:
            assert launch.bucket.holds(1, row.sizes)
            assert not row.request.over
            assert row.request.deadline_s > self.now_s
            if row.request.state is State.WAITING:
                row.request.move(State.RUNNING)
            self.taken.append((row.request, row.index))
        return self.now_s

    def finish(self):
        for _ in range(1000):
            if (until_s := self.next()) == math.inf:
                return
            self.now_s = until_s
        raise AssertionError("rows wait for ever")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, policy=st.sampled_from(POLICIES), window=st.sampled_from([1, 4, 16]))
def test_every_live_row_runs_once_and_equals_keep_their_order(steps, policy, window, ask, batcher_of):
    walk = Walk(batcher_of("1x8,4x8,6x16,1x64,3x64", window=window, **policy), ask)
    for name, *arguments in steps:
        getattr(walk, name)(*arguments)
    walk.finish()
    assert len(walk.taken) == len(set(walk.taken))
    for request in walk.requests:
        mine = [index for one, index in walk.taken if one is request]
        if not request.over and request.deadline_s == math.inf:
            assert sorted(mine) == list(range(len(request.items)))
        for length in set(request.sizes):
            same = [index for index in mine if request.sizes[index] == length]
            assert same == sorted(same)
    assert len(walk.batcher._line) == 0
