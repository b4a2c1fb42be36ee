"""Time: clocks, and the heap of deadlines against a sorted list."""

import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import servax.server
from hypothesis import given
from hypothesis import strategies as st
from servax.server.batching.clock import ManualClock, MonotonicClock
from servax.server.batching.deadlines import Deadlines
from servax.server.batching.request import Request, State


def due_at(deadline_s):
    return Request([{}], [()], arrived_s=0.0, sink=None, deadline_s=deadline_s)


def test_manual_clock_moves_only_when_told():
    clock = ManualClock(5.0)
    assert clock.now() == 5.0
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.now() == 5.25


@pytest.mark.parametrize("step", [-1e-9, math.nan])
def test_manual_clock_never_falls(step):
    clock = ManualClock()
    with pytest.raises(ValueError, match="never falls"):
        clock.advance(step)
    assert clock.now() == 0.0


def test_monotonic_clock_rises():
    clock = MonotonicClock()
    assert clock.now() <= clock.now()


@pytest.mark.parametrize("clock", [ManualClock(10.0), MonotonicClock()])
def test_waiting_for_the_past_returns_at_once(clock):
    condition = threading.Condition()
    with condition:
        clock.wait(condition, clock.now() - 1.0)


def test_advance_wakes_those_who_wait():
    clock, condition = ManualClock(), threading.Condition()
    seen = []

    def sleeper(until_s):
        with condition:
            while clock.now() < until_s:
                clock.wait(condition, until_s)
            seen.append(until_s)

    threads = [threading.Thread(target=sleeper, args=(float(until),)) for until in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        clock.advance(1.0)
    for thread in threads:
        thread.join(10.0)
    assert sorted(seen) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("clock", [ManualClock(), MonotonicClock()])
@pytest.mark.parametrize("until_s", [math.inf, 1e300])
def test_notify_wakes_one_who_waits_for_ever(clock, until_s):
    condition, woken = threading.Condition(), threading.Event()
    asleep = threading.Event()

    def sleeper():
        with condition:
            asleep.set()
            clock.wait(condition, until_s)
        woken.set()

    threading.Thread(target=sleeper, daemon=True).start()
    assert asleep.wait(10.0)
    with condition:
        condition.notify_all()
    assert woken.wait(10.0)


def test_Q10_the_core_never_asks_the_wall_clock():
    folder = Path(servax.server.__file__).parent
    for path in (folder / "api.py", *folder.glob("batching/*.py"), *folder.glob("hosting/*.py")):
        text = path.read_text()
        assert not re.search(r"time\.time\b|datetime|time_ns|localtime|gmtime", text), path.name


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.floats(0, 100) | st.just(math.inf)),
            st.tuples(st.just("end"), st.integers(0, 200)),
            st.tuples(st.just("due"), st.floats(0, 30)),
        ),
        max_size=200,
    )
)
def test_the_heap_equals_a_sorted_list(steps):
    deadlines, model, now_s = Deadlines(), [], 0.0
    for word, value in steps:
        if word == "add":
            request = due_at(value)
            deadlines.add(request)
            model.append(request)
        elif word == "end" and model:
            model.pop(value % len(model)).move(State.CANCELLED)
        elif word == "due":
            now_s += value
            wanted = sorted((r for r in model if r.deadline_s <= now_s), key=lambda r: r.deadline_s)
            found = deadlines.due(now_s)
            assert [r.deadline_s for r in found] == [r.deadline_s for r in wanted]
            assert set(found) == set(wanted)
            model = [request for request in model if request not in found]
        assert deadlines.next_s() == min((r.deadline_s for r in model), default=math.inf)


def test_requests_without_a_deadline_are_not_kept():
    deadlines = Deadlines()
    deadlines.add(due_at(math.inf))
    assert len(deadlines) == 0


@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED])
def test_ended_requests_do_not_pile_up_behind_a_distant_deadline(state):
    deadlines = Deadlines()
    deadlines.add(due_at(5.0))
    sizes = []
    for _ in range(10_000):
        request = due_at(1e6)
        deadlines.add(request)
        if state is State.DONE:
            request.move(State.RUNNING)
        request.move(state)
        sizes.append(len(deadlines))
    assert max(sizes) <= 200
    assert deadlines.next_s() == 5.0


def test_equal_deadlines_come_in_order_of_arrival():
    deadlines, requests = Deadlines(), [due_at(1.0) for _ in range(20)]
    for request in requests:
        deadlines.add(request)
    assert deadlines.due(1.0) == requests
    assert np.isinf(deadlines.next_s())
