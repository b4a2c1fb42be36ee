"""Every trace and compile is counted, under the phase of the thread that caused it."""

import threading

import jax
import numpy as np
import pytest
from servax.jit_cache import BACKGROUND, OTHER, REQUEST, WARMUP, compile_log


def fresh(number):
    """Trace and compile something that nothing compiled before."""
    return jax.jit(lambda x: x * number + 1)(np.ones(3, np.float32))


@pytest.fixture
def log():
    return compile_log()


def in_thread(work):
    failures = []

    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_there_is_one_log_for_the_process(log):
    assert compile_log() is log


@pytest.mark.parametrize("phase", [REQUEST, WARMUP, BACKGROUND])
def test_compiles_count_under_the_threads_phase(log, phase):
    before = log.traces[phase], log.compiles[phase], log.compile_s[phase]
    with log.during(phase):
        assert log.phase == phase
        fresh(2.5)
    assert log.phase == OTHER
    assert log.traces[phase] > before[0]
    assert log.compiles[phase] == before[1] + 1
    assert log.compile_s[phase] > before[2]


def test_phases_nest_and_end_with_an_error(log):
    with log.during(WARMUP):
        with pytest.raises(ZeroDivisionError), log.during(BACKGROUND):
            raise ZeroDivisionError
        assert log.phase == WARMUP
    assert log.phase == OTHER


def test_a_phase_is_the_threads_own(log):
    seen = []

    def work():
        seen.append(log.phase)
        log.mark_thread(REQUEST)
        seen.append(log.phase)

    with log.during(WARMUP):
        in_thread(work)
        assert log.phase == WARMUP
    assert seen == [OTHER, REQUEST]


def test_a_trace_alone_counts_as_a_trace(log):
    before = log.total()
    jax.eval_shape(lambda x: x * 7 + 3, np.ones(3))
    traces, compiles = log.total()
    assert traces > before[0]
    assert compiles == before[1]


def test_what_is_warm_counts_nothing(compiles):
    function = jax.jit(lambda x: x - 5)
    function(np.ones(3))
    with compiles.none():
        function(np.ones(3))
    with pytest.raises(AssertionError, match="1 compiles where there must be none"):
        with compiles.none():
            function(np.ones(4))


def test_listeners_are_told_until_they_leave(log):
    heard = []
    leave = log.subscribe(lambda phase, seconds: heard.append((phase, seconds)))
    with log.during(BACKGROUND):
        fresh(3.5)
    leave()
    leave()
    fresh(4.5)
    assert [phase for phase, _ in heard] == [BACKGROUND]
    assert heard[0][1] > 0


def test_a_failing_listener_breaks_no_compile(log, caplog):
    def fail(phase, seconds):
        raise RuntimeError("metrics are down")

    leave = log.subscribe(fail)
    try:
        np.testing.assert_array_equal(fresh(5.5), np.full(3, 6.5))
    finally:
        leave()
    assert "a listener of compiles failed" in caplog.text


def test_counts_from_many_threads_add_up(log):
    before = log.compiles[BACKGROUND]
    numbers = iter(range(8))

    def work():
        with log.during(BACKGROUND):
            fresh(100.0 + next(numbers))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.compiles[BACKGROUND] == before + 8
