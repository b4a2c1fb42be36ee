"""The compile service: one thread, every outcome in its future."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import jax
import numpy as np
import pytest
from servax.jit_cache import (
    BACKGROUND,
    WARMUP,
    CompileError,
    CompileService,
    compile_log,
    seal_process,
    unseal_process,
)

WAIT_S = 30


def test_jobs_run_in_order_in_one_thread_of_its_own(service):
    seen = []
    jobs = [service.submit(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(10)]
    for job in jobs:
        job.result(WAIT_S)
    assert [n for n, _ in seen] == list(range(10))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failing_job_fails_its_future_and_nothing_else(service, error):
    def job():
        raise error

    assert service.submit(job).exception(WAIT_S) is error
    assert service.submit(lambda: 7).result(WAIT_S) == 7


def test_it_compiles_while_everything_else_is_sealed(service, compiles):
    def work():
        return jax.jit(lambda x: x * 3.75)(np.ones(3, np.float32))

    seal_process()
    try:
        with pytest.raises(RuntimeError, match="no_tracing"):
            work()
        np.testing.assert_array_equal(service.submit(work).result(WAIT_S), np.full(3, 3.75))
        with pytest.raises(RuntimeError, match="no_tracing"):
            jax.jit(lambda x: x)(np.ones(4))
    finally:
        unseal_process()
    assert compiles.count == 1


def test_compiles_are_background_work_once_warmed(service):
    assert service.submit(lambda: compile_log().phase).result(WAIT_S) == WARMUP
    service.warmed()
    assert service.submit(lambda: compile_log().phase).result(WAIT_S) == BACKGROUND


def test_the_thread_has_a_large_stack(service):
    """XLA recurses deeply; the default stack of a thread is 8 MiB at most."""

    def deep(n):
        return 0 if n == 0 else 1 + deep(n - 1)

    before = threading.stack_size()
    assert service.submit(lambda: deep(500)).result(WAIT_S) == 500
    assert threading.stack_size() == before


def test_a_cancelled_job_is_skipped(service):
    gate = threading.Event()
    ran = []
    service.submit(lambda: gate.wait(WAIT_S))
    skipped = service.submit(lambda: ran.append(1))
    assert skipped.cancel()
    gate.set()
    service.submit(lambda: ran.append(2)).result(WAIT_S)
    assert ran == [2]


def test_closing_drops_what_waits_and_ends_the_thread(service):
    started, gate = threading.Event(), threading.Event()
    threads = []

    def first():
        threads.append(threading.current_thread())
        started.set()
        gate.wait(WAIT_S)
        return "done"

    running = service.submit(first)
    waiting = [service.submit(lambda: None) for _ in range(3)]
    assert started.wait(WAIT_S)
    closer = threading.Thread(target=service.close)
    closer.start()
    for job in waiting:
        with pytest.raises(CancelledError):
            job.result(WAIT_S)
    gate.set()
    closer.join(WAIT_S)
    assert running.result(WAIT_S) == "done"
    assert not threads[0].is_alive()
    service.close()
    with pytest.raises(CompileError, match="takes no job after close"):
        service.submit(lambda: None)


def test_closing_what_was_never_used():
    service = CompileService()
    service.close()
    service.close()


def test_it_cannot_be_closed_from_its_own_thread(service):
    with pytest.raises(CompileError, match="call it elsewhere"):
        service.submit(service.close).result(WAIT_S)


def test_nothing_of_a_finished_job_stays_alive(service):
    """The thread waits for its next job, perhaps for days, and must not hold the last model meanwhile."""

    class Thing:
        pass

    future = service.submit(Thing)
    watch = weakref.ref(future.result(WAIT_S))
    del future
    service.submit(gc.collect).result(WAIT_S)
    assert watch() is None
