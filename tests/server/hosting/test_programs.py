"""Options about programs in a running server: budgets, what comes back, what is checked."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Program, ProgramFacts, Servable, WarmupError, compile_program
from servax.jit_cache.schedule import Shape
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice
from servax.server.errors import ConfigError, ModelError, NanOutput
from servax.server.hosting.programs import Programs

KIB = 1024


class Compiler:
    """Programs of a fake device with a size and a compile that can be held or fail."""

    def __init__(self, nbytes=KIB, on_compile=lambda bucket: None):
        self.device = FakeDevice()
        self.compiled = []
        self._nbytes, self._on_compile = nbytes, on_compile

    def __call__(self, servable, bucket, leaves):
        self.compiled.append(bucket)
        self._on_compile(bucket)
        made = self.device.compile(servable, bucket, leaves)
        facts = ProgramFacts(0.0, 0.0, 0.0, 0, 0, 0, self._nbytes)
        return Program(bucket, made.executable, leaves, facts)


def ask(server, length):
    return server(np.arange(length, dtype=np.float32))


def lengths(buckets):
    return [bucket["length"] for bucket in buckets]


def settle(server):
    """Until the warm-up thread has nothing left to do."""
    server._warmup.join(30.0)


# -- budgets ---------------------------------------------------------------------------------------------


def test_W5_a_budget_ends_the_wait_and_the_rest_follows(doubling):
    clock, gate = ManualClock(), threading.Event()

    def compile_slowly(bucket):
        if len(compiler.compiled) > 2:  # what is made after the budget waits for the test
            assert gate.wait(30.0)
        clock.advance(1.0)

    compiler = Compiler(on_compile=compile_slowly)
    server = Server(
        doubling(batch=1, length=64),
        compile_program=compiler,
        clock=clock,
        programs=Programs(budget_s=2.0),
    )
    with server:
        assert lengths(one.bucket for one in server.model().report.warm) == [64, 8]
        assert server.ready
        assert not server.warm
        status = server.status()
        assert (status["done"], status["total"], status["warm"]) == (2, 4, False)
        assert np.array_equal(ask(server, 20), 2 * np.arange(20))  # in the covering bucket
        gate.set()
        settle(server)
        assert server.warm
        assert server.status()["warm"]
        assert lengths(compiler.compiled) == [64, 8, 16, 32]


def test_W5_the_covering_bucket_is_made_whatever_the_budget(doubling):
    clock = ManualClock()
    compiler = Compiler(on_compile=lambda bucket: clock.advance(100.0))
    with Server(
        doubling(batch=1, length=64), compile_program=compiler, clock=clock, programs=Programs(budget_s=0.01)
    ) as server:
        assert server.ready
        settle(server)
        assert server.warm


def test_W5_traffic_decides_what_is_warmed_next(doubling):
    compiler = Compiler()
    shapes = {"double": [Shape(1, (30,), 100.0), Shape(1, (12,), 10.0)]}
    with Server(
        doubling(batch=1, length=64),
        compile_program=compiler,
        clock=ManualClock(),
        programs=Programs(shapes=shapes),
    ):
        assert lengths(compiler.compiled) == [64, 32, 16, 8]


def test_W5_a_budget_of_bytes_holds_for_good(doubling):
    compiler = Compiler()
    with Server(
        doubling(batch=1, length=64),
        compile_program=compiler,
        clock=ManualClock(),
        programs=Programs(budget_bytes=3 * KIB),
    ) as server:
        settle(server)
        assert server.ready
        assert not server.warm
        assert server.model().report.code_bytes == 3 * KIB
        assert len(server.model().report.left(server.model().order)) == 1


def test_W5_what_was_left_resumes_from_the_store(doubling, tmp_path):
    servable = doubling(batch=1, length=64)
    made = []
    for budget in (3, 5):
        options = Programs(budget_bytes=1 << 62 if budget == 5 else 1)
        with Server(servable, store=Store.open(tmp_path / "store"), programs=options) as server:
            settle(server)
            made.append([(one.bucket["length"], one.facts.source) for one in server.model().report.warm])
    assert made[0] == [(64, "compiled")]
    assert made[1] == [(64, "store"), (8, "compiled"), (16, "compiled"), (32, "compiled")]


def test_run_times_that_traffic_corrected_are_remembered(doubling, tmp_path):
    servable = doubling(batch=1, length=16)
    tried, hardly = (Bucket(("batch", "length"), (1, length)) for length in (8, 16))
    with Server(servable, store=Store.open(tmp_path / "store")) as server:
        for _ in range(9):
            ask(server, 5)
        ask(server, 12)
        cost = server.model().cost
        assert not cost.hopes(tried)
    with Server(servable, store=Store.open(tmp_path / "store")) as server:
        known = {one.bucket: one.facts.run_s for one in server.model().report.warm}
        assert known[tried] == cost.measured()[tried]
        assert known[hardly] > 0  # as warm-up measured it
        # A machine may have changed meanwhile: what is remembered is tried again, too.
        assert server.model().cost.hopes(tried)


# -- what a request does whose bucket is cold ------------------------------------------------------------


def cold_server(doubling, request, policy, **options):
    """A server over four lengths of which only the covering one is warm."""
    compiler = Compiler()
    server = Server(
        doubling(batch=1, length=64),
        compile_program=compiler,
        clock=ManualClock(),
        programs=Programs(policy=policy, budget_bytes=1, **options),
    )
    request.addfinalizer(server.close)
    server.start().wait_ready()
    settle(server)
    assert lengths(compiler.compiled) == [64]
    return server, compiler


def test_W4_strict_runs_in_a_larger_warm_bucket_and_counts(doubling, request):
    server, compiler = cold_server(doubling, request, "strict")
    for _ in range(3):
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert lengths(compiler.compiled) == [64]
    assert server.status()["cold_hits"] == 3
    assert {run.bucket["length"] for run in compiler.device.runs} == {64}


def test_W4_C9_background_makes_the_better_program_and_uses_it_between_batches(doubling, request):
    server, compiler = cold_server(doubling, request, "background")
    gate, began = threading.Event(), threading.Event()

    def held(bucket):
        began.set()
        assert gate.wait(30.0)

    compiler._on_compile = held
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


def test_W4_a_program_that_cannot_be_made_is_tried_once(doubling, request, caplog):
    server, compiler = cold_server(doubling, request, "background")
    tried = threading.Event()

    def fail(bucket):
        tried.set()
        raise RuntimeError("no such kernel")

    compiler._on_compile = fail
    for _ in range(5):
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))
    assert tried.wait(30.0)
    server._compiler.submit(lambda: None).result()  # whatever was asked for is through
    assert lengths(compiler.compiled) == [64, 16]
    assert server.ready
    assert "no such kernel" in caplog.text


def wait_for(server, done):
    """Let jobs of the compile and the device thread pass until something holds."""
    for _ in range(1000):
        if done():
            return
        server._compiler.submit(lambda: None).result()
        ask(server, 64)
    raise AssertionError("it never came true")


def test_C8_what_left_the_cache_comes_back_from_the_store_without_a_compile(doubling, tmp_path, compiles):
    servable = doubling(batch=1, length=64)
    with Server(servable, store=Store.open(tmp_path / "store")) as server:
        sizes = [one.facts.code_bytes for one in server.model().report.warm]
    assert min(sizes) > 0
    options = Programs(policy="background", cache_bytes=sum(sizes) - min(sizes) // 2)
    store = Store.open(tmp_path / "store")
    with Server(servable, store=store, programs=options) as server:
        settle(server)
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


@pytest.mark.parametrize(
    "options",
    [{"policy": "eager"}, {"cache_bytes": 5}, {"budget_s": 0}, {"memory_bytes": -1}, {"budget_bytes": 0}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match="got"):
        Programs(**options)


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


def test_W8_a_lazy_model_that_does_not_compile_tells_those_who_wait_and_is_tried_again(doubling):
    def fail(bucket):
        raise RuntimeError("no such kernel")

    compiler = Compiler(on_compile=fail)
    with Server(
        doubling(), compile_program=compiler, clock=ManualClock(), programs=Programs(policy="lazy")
    ) as server:
        for _ in range(2):
            with pytest.raises(ModelError, match="no such kernel"):
                ask(server, 10)
        compiler._on_compile = lambda bucket: None
        assert np.array_equal(ask(server, 10), 2 * np.arange(10))


# -- memory ----------------------------------------------------------------------------------------------


def matrix(rows=64):
    return Servable(
        lambda w, *, x: jnp.tanh(x[..., None] * w[0]).sum(-1),
        np.ones((4, 4 * KIB), np.float32),
        inputs={"x": "float32[length]"},
        limits={"batch": rows, "length": 64},
        scheme={"batch": [1, rows], "length": [8, 64]},
        name="matrix",
    )


def test_W6_what_does_not_fit_is_dropped_and_named_before_anything_is_allocated(caplog):
    abstract, plans = [], []

    def make(servable, bucket, leaves):
        abstract.append(all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves))
        return compile_program(servable, bucket, leaves)

    def serve(memory_bytes):
        options = Programs(memory_bytes=memory_bytes, on_plan=lambda *one: plans.append(one))
        return Server(matrix(), compile_program=make, programs=options)

    with serve(1 << 40) as server:
        assert len(server.model().grid) == 4
        assert abstract == [True] * 4  # compiled once, for the plan
    name, whole = plans[0]
    assert (name, whole.dropped, whole.weights_bytes) == ("matrix", (), 64 * KIB)
    with serve(whole.need_bytes - 1) as server:
        plan = plans[1][1]
        assert len(plan.dropped) == 1
        assert Bucket(("batch", "length"), (1, 64)) in plan.kept
        assert set(server.model().grid) == set(plan.kept)
        assert server.model().report.complete
        x = np.linspace(-1, 1, 60).astype(np.float32)
        assert np.allclose(server(x), np.tanh(x) * 4 * KIB, rtol=1e-4)
        assert f"dropped, since they do not fit: {plan.dropped[0]}" in caplog.text


def test_W6_what_libraries_took_is_measured_once_and_planned_with_at_the_next_start(tmp_path, monkeypatch):
    measured, plans = [], []

    def peak(call):
        call()
        measured.append(1)
        return 1 << 30  # a gibibyte, whatever runs

    monkeypatch.setattr("servax.server.hosting.warming.peak_bytes", peak)
    options = Programs(memory_bytes=1 << 40, on_plan=lambda _, plan: plans.append(plan))
    for _ in range(2):
        with Server(matrix(), store=Store.open(tmp_path / "store", trial=None), programs=options) as server:
            assert server(np.zeros(3, np.float32)).shape == (3,)
            least = min(one.facts.output_bytes for one in server.model().report.warm)
    first, second = plans
    assert first.temp_bytes < 1 << 29  # an estimate
    assert second.temp_bytes == (1 << 30) - least
    assert len(measured) == 4  # each program once, in the first start only


def test_W6_weights_that_do_not_fit_are_refused():
    with (
        pytest.raises(WarmupError, match=r"must fit; bucket .* more than there is"),
        Server(matrix(), programs=Programs(memory_bytes=1000)),
    ):
        pass


def test_W6_a_hundred_batches_in_the_largest_bucket_leave_memory_flat():
    probe = Path(__file__).parent / "flat_probe.py"
    done = subprocess.run([sys.executable, str(probe)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["buckets"] == [[16, 16]]
    if found["before"]:
        assert found["after"] <= 1.02 * found["before"]  # one batch's inputs and outputs are 6.4 MB


def test_W6_the_hosts_copy_of_the_weights_goes():
    servable = matrix()
    with Server(servable) as server:
        assert not any(isinstance(leaf, np.ndarray) for leaf in servable.leaves)
        assert server(np.zeros(3, np.float32)).shape == (3,)


# -- checks ----------------------------------------------------------------------------------------------


def mean(*, x):
    return {"y": x.mean(1)}  # padding counts


def test_P13_a_model_that_padding_changes_is_refused_when_it_is_registered():
    servable = Servable(mean, inputs={"x": "float32[length]"}, limits={"batch": 4, "length": 16}, name="mean")
    with (
        pytest.raises(WarmupError, match="length"),
        Server(servable, programs=Programs(check_padding=True)),
    ):
        pass


def test_P13_one_that_passes_is_served(doubling):
    with Server(doubling(), programs=Programs(check_padding={"double": {"seed": 3}})) as server:
        assert np.array_equal(ask(server, 5), 2 * np.arange(5))


def nan_at_seven(x):
    return jnp.where(x == 7, jnp.nan, x)


@pytest.mark.parametrize("guard", [True, False])
def test_P10_the_caller_of_a_nan_row_gets_a_fault_and_its_mates_succeed(guard):
    servable = Servable(nan_at_seven, inputs={"x": "float32[]"}, limits={"batch": 4}, name="nan")
    records = []
    with Server(
        servable, max_wait_s=30.0, on_batch=records.append, programs=Programs(check_outputs=guard)
    ) as server:
        model = server.model()
        rows = [[{"x": np.float32(value)}] for value in (1, 7, 2, 3)]
        futures = [model.run_threaded(one) for one in rows]
        assert [float(futures[place].result(30.0)[0][0]) for place in (0, 2, 3)] == [1, 2, 3]
        assert len(records) == 1  # one batch, no retry
        if guard:
            with pytest.raises(NanOutput, match="'nan' answered this request with NaN"):
                futures[1].result(30.0)
            assert issubclass(NanOutput, ModelError)
            assert NanOutput.reason != ModelError.reason  # counted apart in /metrics
        else:
            assert np.isnan(futures[1].result(30.0)[0][0])
