"""What a request does whose bucket is cold: strict, in the background, lazily."""

import threading

import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.clock import ManualClock
from servax.server.errors import ModelError
from servax.server.hosting.programs import Programs


def ask(server, length):
    return server(np.arange(length, dtype=np.float32))


def lengths(buckets):
    return [bucket["length"] for bucket in buckets]


def wait_for(server, done):
    """Let jobs of the compile and the device thread pass until something holds."""
    for _ in range(1000):
        if done():
            return
        server._compiler.submit(lambda: None).result()
        ask(server, 64)
    raise AssertionError("it never came true")


@pytest.fixture
def cold_server(doubling, request, compiler_of):
    """Makes a server over four lengths of which only the covering one is warm."""

    def make(policy):
        compiler = compiler_of()
        server = Server(
            doubling(batch=1, length=64),
            compile_program=compiler,
            clock=ManualClock(),
            programs=Programs(policy=policy, budget_bytes=1),
        )
        request.addfinalizer(server.close)
        server.start().wait_ready()
        server._warmup.join(30.0)
        assert lengths(compiler.compiled) == [64]
        return server, compiler

    return make


def test_W4_strict_runs_in_a_larger_warm_bucket_and_counts(cold_server):
    server, compiler = cold_server("strict")
    for _ in range(3):
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert lengths(compiler.compiled) == [64]
    assert server.status()["cold_hits"] == 3
    assert {run.bucket["length"] for run in compiler.device.runs} == {64}


def test_W4_C9_background_makes_the_better_program_and_uses_it_between_batches(cold_server):
    server, compiler = cold_server("background")
    gate, began = threading.Event(), threading.Event()

    def held(bucket):
        began.set()
        assert gate.wait(30.0)

    compiler.on_compile = held
    assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert began.wait(30.0)
    for _ in range(5):  # the compile goes on; nobody waits for it, nor is it asked for again
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert {run.bucket["length"] for run in compiler.device.runs} == {64}
    gate.set()
    wait_for(server, lambda: len(server.model().grid) == 2)
    compiler.device.runs.clear()
    assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert lengths(run.bucket for run in compiler.device.runs) == [16]
    assert lengths(compiler.compiled) == [64, 16]
    assert server.status()["cold_hits"] == 6


def test_W4_a_program_that_cannot_be_made_is_tried_once(cold_server, caplog):
    server, compiler = cold_server("background")
    tried = threading.Event()

    def fail(bucket):
        tried.set()
        raise RuntimeError("no such kernel")

    compiler.on_compile = fail
    for _ in range(5):
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert tried.wait(30.0)
    server._compiler.submit(lambda: None).result()  # whatever was asked for is through
    assert lengths(compiler.compiled) == [64, 16]
    assert server.ready
    assert "no such kernel" in caplog.text


def test_C8_what_left_the_cache_comes_back_from_the_store_without_a_compile(doubling, tmp_path, compiles):
    servable = doubling(batch=1, length=64)
    with Server(servable, store=Store.open(tmp_path / "store")) as server:
        sizes = [one.facts.code_bytes for one in server.model().report.warm]
    assert min(sizes) > 0
    options = Programs(policy="background", cache_bytes=sum(sizes) - min(sizes) // 2)
    store = Store.open(tmp_path / "store")
    with Server(servable, store=store, programs=options) as server:
        server._warmup.join(30.0)
        model = server.model()
        assert len(model.grid) == len(model.cache.ready()) == 3
        with compiles.none():
            for length in (8, 16, 32, 64):
                want = Bucket(("batch", "length"), (1, length))
                for _ in range(200):
                    if want in model.grid:
                        break
                    assert np.array_equal(ask(server, length), 2 * np.arange(length))
                    server._compiler.submit(lambda: None).result()
                assert want in model.grid
                assert len(model.cache.ready()) == 3
        assert model.keeper.residency.cold_hits > 0
    assert store.report().compiled == 0


def test_W8_without_warm_up_nothing_compiles_before_the_first_request(doubling, compiles):
    with Server(doubling(batch=2, length=64), programs=Programs(policy="lazy"), seal=True) as server:
        assert server.ready
        assert not server.warm
        assert compiles.count == 0
        assert server.status()["done"] == 0
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
        assert compiles.count >= 1
        wait_for(server, lambda: Bucket(("batch", "length"), (1, 16)) in server.model().grid)
        with compiles.none():
            assert np.array_equal(ask(server, 10), 2 * np.arange(10))


def test_W8_a_lazy_model_that_does_not_compile_tells_those_who_wait_and_is_tried_again(doubling, compiler_of):
    def fail(bucket):
        raise RuntimeError("no such kernel")

    compiler = compiler_of(on_compile=fail)
    with Server(
        doubling(), compile_program=compiler, clock=ManualClock(), programs=Programs(policy="lazy")
    ) as server:
        for _ in range(2):
            with pytest.raises(ModelError, match="no such kernel"):
                ask(server, 10)
        compiler.on_compile = lambda bucket: None
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
