"""Warm-up as a user sees it: progress, failures, who waits for it."""

import re
import threading

import numpy as np
import pytest
from servax.jit_cache import CompileError, WarmupError
from servax.server import Closed, NotReady, Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice


class Compiler:
    """Compiles like the fake device, but waits for a permit for each bucket, and fails some."""

    def __init__(self, fails=(), gated=False):
        self.device = FakeDevice()
        self.fails = set(fails)
        self.permits = threading.Semaphore(0)
        self.gated = gated

    def __call__(self, servable, bucket, leaves):
        if self.gated and not self.permits.acquire(timeout=30.0):
            raise TimeoutError
        if str(bucket) in self.fails:
            raise CompileError(f"bucket {bucket} is too much")
        return self.device.compile(servable, bucket, leaves)


@pytest.fixture
def warming(request, doubling):
    """Starts a server whose compiles wait for permits."""

    def make(*servables, fails=(), gated=True, **options):
        compiler = Compiler(fails, gated)
        server = Server(*servables, compile_program=compiler, **options)

        def end():
            for _ in range(1000):
                compiler.permits.release()
            server.close(0.0)

        request.addfinalizer(end)
        return server.start(), compiler

    return make


def test_W2_a_failed_bucket_is_named_at_once_and_not_after_a_timeout(warming, doubling):
    servable = doubling(batch=4, scheme=[32])  # 1x32, 2x32, 4x32
    server, compiler = warming(servable, fails=["2x32"])
    compiler.permits.release()
    compiler.permits.release()
    with pytest.raises(WarmupError, match=r"2x32.*is too much"):
        server.wait_ready(600.0)  # the third compile still waits for its permit
    status = server.status()
    assert status["state"] == "failed"
    assert list(status["failed"]) == ["double 2x32"]
    assert "too much" in status["failed"]["double 2x32"]
    assert not server.ready
    assert server.live
    with pytest.raises(NotReady):
        server([1.0])


def test_W2_the_other_buckets_serve_when_coverage_is_enough(warming, doubling):
    server, compiler = warming(
        doubling(batch=4, scheme=[32]), fails=["2x32"], gated=False, ready_when="coverage"
    )
    server.wait_ready(60.0)
    server._warmup._thread.join(20.0)
    assert server.ready
    status = server.status()
    assert (status["state"], status["done"], status["total"]) == ("ready", 2, 3)
    assert list(status["failed"]) == ["double 2x32"]
    compiler.device.runs.clear()
    assert np.array_equal(server(np.ones((7, 3))), np.full((7, 3), 2.0))
    assert all(str(run.bucket) != "2x32" for run in compiler.device.runs)


def test_W2_coverage_that_cannot_be_reached_is_named_at_once(warming, doubling):
    servable = doubling(batch=4, scheme=[32])
    server, compiler = warming(servable, fails=["1x32"], ready_when="coverage")
    compiler.permits.release()
    with pytest.raises(WarmupError, match=r"1x32.*is too much"):
        server.wait_ready(600.0)
    assert server.status()["state"] == "failed"


def test_W3_progress_is_seen_and_coverage_is_enough_to_answer(warming, doubling):
    steps = []
    server, compiler = warming(
        doubling(batch=4, scheme=[32]),
        ready_when="coverage",
        on_progress=lambda name, step: steps.append((name, str(step.bucket), step.done, step.total)),
    )
    assert (server.status()["state"], server.status()["done"]) == ("warming", 0)
    assert server.live
    compiler.permits.release()
    server.wait_ready(20.0)
    assert server.status()["done"] == 1
    assert np.array_equal(server(np.ones((2, 3))), np.full((2, 3), 2.0))
    compiler.permits.release()
    compiler.permits.release()
    server._warmup._thread.join(20.0)
    assert steps == [("double", "1x32", 1, 3), ("double", "2x32", 2, 3), ("double", "4x32", 3, 3)]
    assert server.status()["state"] == "ready"


def test_all_models_get_their_covering_bucket_before_any_gets_the_rest(warming, doubling):
    steps = []
    server, _ = warming(
        doubling(batch=2, scheme=[32], name="a"),
        doubling(batch=2, scheme=[32], name="b"),
        ready_when="coverage",
        gated=False,
        on_progress=lambda name, step: steps.append(f"{name} {step.bucket}"),
    )
    server.wait_ready(20.0)
    server._warmup._thread.join(20.0)
    assert steps == ["a 1x32", "b 1x32", "a 2x32", "b 2x32"]


def test_wait_ready_gives_up_at_its_timeout(doubling, request):
    clock, compiler = ManualClock(), Compiler(gated=True)
    server = Server(doubling(), compile_program=compiler, clock=clock).start()
    errors = []

    def wait():
        try:
            server.wait_ready(5.0)
        except NotReady as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        clock.advance(5.0)
        thread.join(0.05)
    assert re.search(r"within 5 s; 0 of \d+ programs are warm", errors[0])
    for _ in range(100):
        compiler.permits.release()
    server.close(0.0)


def test_close_during_warm_up_ends_it_and_wakes_who_waits(warming, doubling):
    server, compiler = warming(doubling())
    errors = []

    def wait():
        try:
            server.wait_ready(600.0)
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    closer = threading.Thread(target=server.close, args=(0.0,))
    closer.start()
    thread.join(20.0)
    assert len(errors) == 1
    compiler.permits.release()  # the compile in hand is waited for
    closer.join(20.0)
    assert not closer.is_alive()
    assert server.status()["done"] <= 1


def test_a_progress_callback_that_fails_is_not_lost(warming, doubling):
    def fails(name, step):
        raise RuntimeError("no terminal")

    server, _ = warming(doubling(), gated=False, on_progress=fails)
    with pytest.raises(WarmupError, match="warm-up ended early: no terminal"):
        server.wait_ready(20.0)
    assert server.status()["error"] == "no terminal"
    with pytest.raises(NotReady, match=r"not tried again: .* the warm-up ended early: no terminal"):
        server([1.0])
