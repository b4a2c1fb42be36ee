"""Options about programs in a running server: budgets, what comes back, what is checked."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Servable, WarmupError
from servax.jit_cache.schedule import Shape
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.clock import ManualClock
from servax.server.errors import ConfigError, ModelError, NanOutput
from servax.server.hosting.programs import Programs

KIB = 1024


def ask(server, length):
    return server(np.arange(length, dtype=np.float32))


def lengths(buckets):
    return [bucket["length"] for bucket in buckets]


def settle(server):
    """Until the warm-up thread has nothing left to do."""
    server._warmup.join(30.0)


# -- budgets -------------------------------------------------------------------------------------------


def test_W5_a_budget_ends_the_wait_and_the_rest_follows(doubling, compiler_of):
    clock, gate = ManualClock(), threading.Event()

    def compile_slowly(bucket):
        if len(compiler.compiled) > 2:  # what is made after the budget waits for the test
            assert gate.wait(30.0)
        clock.advance(1.0)

    compiler = compiler_of(on_compile=compile_slowly)
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


def test_W5_the_covering_bucket_is_made_whatever_the_budget(doubling, compiler_of):
    clock = ManualClock()
    compiler = compiler_of(on_compile=lambda bucket: clock.advance(100.0))
    with Server(
        doubling(batch=1, length=64), compile_program=compiler, clock=clock, programs=Programs(budget_s=0.01)
    ) as server:
        assert server.ready
        settle(server)
        assert server.warm


def test_W5_traffic_decides_what_is_warmed_next(doubling, compiler_of):
    compiler = compiler_of()
    shapes = {"double": [Shape(1, (30,), 100.0), Shape(1, (12,), 10.0)]}
    with Server(
        doubling(batch=1, length=64),
        compile_program=compiler,
        clock=ManualClock(),
        programs=Programs(shapes=shapes),
    ):
        assert lengths(compiler.compiled) == [64, 32, 16, 8]


def test_W5_a_budget_of_bytes_holds_for_good(doubling, compiler_of):
    compiler = compiler_of()
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


def test_W5_a_program_that_models_share_counts_once(doubling):
    def warm(count, **options):
        models = [doubling(batch=1, length=16, name=f"tune-{number}") for number in range(count)]
        with Server(*models, programs=Programs(**options)) as server:
            settle(server)
            return list(server.reports.values())

    (alone,) = warm(1)
    most = 2 * alone.code_bytes  # the largest may come once more, as far as is known before
    assert [len(one.warm) for one in warm(4, budget_bytes=most)] == [len(alone.warm)] * 4


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


# -- what a request does whose bucket is cold ----------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"policy": "eager"}, {"cache_bytes": 5}, {"budget_s": 0}, {"memory_bytes": -1}, {"budget_bytes": 0}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match="got"):
        Programs(**options)


# -- checks --------------------------------------------------------------------------------------------


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
        if guard:
            with pytest.raises(NanOutput, match="'nan' answered this request with NaN"):
                futures[1].result(30.0)
            assert issubclass(NanOutput, ModelError)
            assert NanOutput.reason != ModelError.reason  # counted apart in /metrics
        else:
            assert np.isnan(futures[1].result(30.0)[0][0])
    assert len(records) == 1  # one batch, no retry
