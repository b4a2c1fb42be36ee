"""F4: a step that never returns makes the server not ready, and nobody waits in silence."""

import threading

import pytest
from servax.server.batching.clock import ManualClock
from servax.server.errors import DeadlineExceeded, Unavailable
from servax.server.generation import GenerationServer, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


@pytest.fixture
def hung(serve):
    """A server whose first step hangs until the gate opens, its clock, and what came of two requests."""
    clock, gate, entered = ManualClock(), threading.Event(), threading.Event()
    server = serve(clock=clock, stall_s=5.0)
    step = server.engine.programs.step

    def held(key, batch):
        entered.set()
        assert gate.wait(30)
        return step(key, batch)

    server.engine.programs.step = held
    outcomes = []

    def ask(prompt, timeout_s):
        try:
            outcomes.append(server.generate(prompt, LONG, timeout_s=timeout_s))
        except Exception as error:
            outcomes.append(error)

    callers = [threading.Thread(target=ask, args=args) for args in (([5, 6], None), ([5, 7], 2.0))]
    callers[0].start()
    assert entered.wait(30)
    callers[1].start()
    yield server, clock, gate, callers, outcomes
    gate.set()


def until(condition, timeout_s=20.0):
    """Waits for another thread's work, which no clock of ours drives."""
    pause, left = threading.Event(), int(timeout_s / 0.005)
    while not condition():
        left -= 1
        assert left, "not in time"
        pause.wait(0.005)


def test_F4_a_hanging_step_is_found_told_and_got_over(hung):
    server, clock, gate, callers, outcomes = hung
    until(lambda: len(server._desk._live) == 2)
    clock.advance(2.5)
    callers[1].join(20)
    assert isinstance(outcomes[0], DeadlineExceeded), "its own limit ends it, however long the device hangs"
    assert server.ready
    clock.advance(3.0)
    callers[0].join(20)
    assert isinstance(outcomes[1], Unavailable)
    assert "finish something every 5 s" in str(outcomes[1])
    assert not server.ready
    assert not server.live
    assert server.status()["state"] == "stalled"
    with pytest.raises(Unavailable, match="use another replica"):
        server.generate([5, 8], LONG)
    gate.set()
    until(lambda: server.ready and not server.load()["running"])
    assert len(server.generate([5, 8], LONG).ids) == 50


def test_close_does_not_wait_for_those_who_were_told(hung):
    server, clock, gate, callers, _ = hung
    until(lambda: len(server._desk._live) == 2)
    clock.advance(11.0)
    for caller in callers:
        caller.join(20)
    assert server._desk.wait_idle(0.0)
    gate.set()


def test_a_stall_is_looked_for_in_positive_time(tiny):
    with pytest.raises(ValueError, match="stall_s is above 0"):
        GenerationServer(tiny, stall_s=0.0)
