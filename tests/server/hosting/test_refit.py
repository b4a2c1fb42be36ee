"""Re-fit: the pure decision, and a live grid that follows its traffic with no compile on a request's way."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import jax.numpy as jnp
import numpy as np
import pytest
import servax
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Grid, Ladder
from servax.jit_cache import REQUEST, WarmupError, compile_log
from servax.server import BatchRecord, ConfigError, RefitPolicy
from servax.server.cli.counting import compile_counter
from servax.server.events import REFIT
from servax.server.explain import grid_rows
from servax.server.hosting.refit import Refitter, Traffic, propose
from servax.server.http.debug import effective, overview
from servax.server.metrics import Metrics

AXES = ("batch", "length")
EAGER = RefitPolicy(interval_s=3600.0, min_rows=20, raise_at=0.2, clear_at=0.1, hold_s=0.0)


def ladder_grid(*rungs: int) -> Grid:
    return Grid.product({"batch": Ladder((1, 4)), "length": Ladder(rungs)})


def test_the_fitted_grid_keeps_its_size_its_batches_and_its_limit() -> None:
    found = propose(ladder_grid(16, 64, 256), {"length": 256}, {"length": {70: 90.0, 20: 10.0}})
    assert found is not None
    assert found.grid.rungs("length") == (20, 70, 256)
    assert found.grid.rungs("batch") == (1, 4)
    assert found.waste_after == 0
    assert found.waste_before == pytest.approx(1 - (70 * 90 + 20 * 10) / (256 * 90 + 64 * 10))


@given(st.dictionaries(st.integers(1, 256), st.floats(1, 100), min_size=1, max_size=30))
def test_a_fitted_grid_covers_and_is_never_worse(counts: dict[int, float]) -> None:
    found = propose(ladder_grid(16, 64, 256), {"length": 256}, {"length": counts})
    assert found is not None
    found.grid.check_coverage({"length": 256})
    assert found.waste_after <= found.waste_before + 1e-12
    assert len(found.grid.rungs("length")) <= 3


def test_nothing_is_decided_from_little_or_without_an_axis() -> None:
    assert propose(ladder_grid(16, 256), {"length": 256}, {"length": {70: 5.0}}, min_rows=6) is None
    assert propose(Grid.parse("1 4", ("batch",)), {}, {}) is None


@pytest.mark.parametrize(
    "bad", [{"interval_s": 0}, {"half_life_s": -1}, {"min_rows": 0}, {"gain": 0}, {"gain": 1}]
)
def test_impossible_policies_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a re-fit needs"):
        RefitPolicy(**bad)  # type: ignore[arg-type]


class Stage:
    """A refitter over fakes: what it asks for, and what becomes of it."""

    def __init__(self, policy: RefitPolicy = EAGER, fail: Callable[[object], None] | None = None) -> None:
        self.now_s = 0.0
        self.grid = ladder_grid(16, 64, 256)
        self.traffic = Traffic(("length",), policy.half_life_s)
        self.made: list[object] = []
        self.fail = fail
        self.refitter = Refitter(
            policy,
            grid=lambda: self.grid,
            limits={"length": 256},
            traffic=self.traffic,
            now_s=lambda: self.now_s,
            request=self._request,
            probe=lambda program: 0.001,
            swap=self._swap,
        )

    def _request(self, bucket: object) -> "Future[object]":
        future: Future[object] = Future()
        self.made.append(bucket)
        if self.fail is None:
            future.set_result(bucket)
        else:
            future.set_exception(RuntimeError("no memory for it"))
        return future

    def _swap(self, grid: Grid, timeout_s: float) -> None:
        self.grid = grid


def test_only_new_buckets_are_made_and_it_settles() -> None:
    stage = Stage()
    stage.traffic.add([(70,)] * 40, 0.0)
    assert stage.refitter.look()
    assert stage.grid.rungs("length")[-2:] == (70, 256)
    assert {str(one) for one in stage.made} == {"1x70", "4x70"}
    assert not stage.refitter.look()
    assert stage.refitter.swaps == 1


def test_waste_must_hold_before_anything_is_done() -> None:
    policy = RefitPolicy(interval_s=1.0, min_rows=20, raise_at=0.2, clear_at=0.1, hold_s=10.0)
    stage = Stage(policy)
    stage.traffic.add([(70,)] * 400, 0.0)
    assert not stage.refitter.look()
    stage.now_s = 5.0
    assert not stage.refitter.look()
    stage.now_s = 10.0
    assert stage.refitter.look()


def test_a_ladder_that_saves_too_little_is_left_alone() -> None:
    stage = Stage()
    stage.traffic.add([(size,) for size in range(1, 257)] * 4, 0.0)  # no three rungs fit that much better
    policy = RefitPolicy(interval_s=1, min_rows=20, raise_at=0.05, clear_at=0.05, hold_s=0, gain=0.5)
    other = Stage(policy)
    other.traffic = stage.traffic
    assert not other.refitter.look()
    assert other.made == []


def test_a_failed_compile_leaves_the_grid_and_says_why() -> None:
    stage = Stage(fail=lambda _: None)
    before = stage.grid
    stage.traffic.add([(70,)] * 40, 0.0)
    assert not stage.refitter.look()
    assert stage.grid is before
    assert "no memory for it" in str(stage.refitter.error)
    assert stage.refitter.failures == 1
    stage.fail = None
    assert stage.refitter.look()
    assert stage.refitter.error is None


def test_a_live_grid_follows_its_traffic_without_a_compile_on_the_way() -> None:
    records: list[BatchRecord] = []
    metrics = Metrics()
    unsubscribe = compile_log().subscribe(compile_counter(metrics))
    servable = servax.Servable(
        lambda x, mask: jnp.where(mask, x, 0.0).sum(1),
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"length": 256, "batch": 4},
        scheme=[32, 64, 256],
    )
    with servax.Server(servable, refit=EAGER, seal=True, on_batch=records.append) as server:
        refitter = server.refitters["model"]
        stop, failures = threading.Event(), []

        def load(length: Callable[[], int]) -> None:
            while not stop.is_set():
                size = length()
                try:
                    assert server(x=np.ones(size, np.float32)) == size
                except Exception as error:  # told to the test below
                    failures.append(error)

        current = [60]
        threads = [threading.Thread(target=load, args=(lambda: current[0],)) for _ in range(3)]
        for thread in threads:
            thread.start()
        _until(lambda: len(records) > 100)
        assert not refitter.look()  # 60 of 64: it fits
        current[0] = 70
        _until(lambda: sum(record.bucket["length"] == 256 for record in records) > 300)
        on_path = compile_log().compiles[REQUEST], compile_log().traces[REQUEST]
        assert refitter.look()
        seen = len(records)
        _until(lambda: len(records) > seen + 100)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert (compile_log().compiles[REQUEST], compile_log().traces[REQUEST]) == on_path
        assert {record.bucket["length"] for record in records[seen + 10 :]} == {70}
        model = server.model()
        assert set(model.cache.ready()) == set(model.grid)
        _require_shown(server, metrics)
        assert 256 in model.grid.rungs("length")
        assert server(x=np.ones(256, np.float32)) == 256
    unsubscribe()


def _require_shown(server: servax.Server, metrics: Metrics) -> None:
    """After a re-fit: its grid and no other bucket, named programs, a count, the option in force."""
    model = server.model()
    metrics.refitters = server.refitters
    (one,) = overview(server, metrics, 0.0)["models"]
    assert {row["bucket"] for row in one["buckets"]} == {str(bucket) for bucket in model.grid}
    assert {(row["state"], row["source"]) for row in one["buckets"]} == {("warm", "compiled")}
    assert all(row["planned"] and row["code_bytes"] > 0 for row in one["buckets"])
    told = [event for event in metrics.events.listed() if event["phase"] == "background"]
    assert {(event["model"], event["cause"]) for event in told} == {("model", REFIT)}
    assert {event["bucket"] for event in told} == {str(one) for one in model.grid} - {
        str(one) for one in model.servable.grid
    }
    assert metrics.value("servax_refits_total", model="model", outcome="done") == 1
    assert metrics.value("servax_refits_total", model="model", outcome="failed") == 0
    body = effective(server, "model", {"scheme": {"value": "fit", "source": "flag"}})
    assert body["options"]["scheme"] == {"value": "fitted to traffic", "source": "re-fit"}
    assert body["rungs"]["length"] == list(model.grid.rungs("length"))


def _until(done: Callable[[], bool], limit_s: float = 60.0) -> None:
    give_up = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def _summing(version: str, fail: bool = False) -> servax.Servable:
    def apply(x: jnp.ndarray, mask: jnp.ndarray) -> jnp.ndarray:
        if fail:
            raise RuntimeError("no such kernel")
        return jnp.where(mask, x, 0.0).sum(1)

    return servax.Servable(
        apply,
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"length": 256, "batch": 4},
        scheme=[32, 64, 256],
        version=version,
    )


def test_a_new_version_begins_with_the_fitted_grid_and_is_fitted_on() -> None:
    with servax.Server(_summing("1"), refit=EAGER) as server:

        def drift(size: int) -> None:
            for _ in range(60):
                assert server(x=np.ones((4, size), np.float32)).tolist() == [size] * 4

        first = server.refitters["model"]
        drift(70)
        assert first.look()
        fitted = server.model().grid
        assert 70 in fitted.rungs("length")

        new = server.replace(_summing("2"))
        assert server.model() is new
        assert new.grid == fitted
        assert {row["bucket"] for row in grid_rows(new, {})} == {str(bucket) for bucket in fitted}
        assert set(new.cache.ready()) == set(fitted)
        second = server.refitters["model"]
        assert second is not first
        assert second.swaps == 1
        assert not first._thread.is_alive()
        drift(130)
        drift(130)
        assert second.look()
        assert 130 in new.grid.rungs("length")

        with pytest.raises(WarmupError, match="no such kernel"):
            server.replace(_summing("3", fail=True))
        # The old version goes on, and so does its fitting.
        assert server.model() is new
        for _ in range(3):
            drift(140)
        assert server.refitters["model"].look()
        assert 140 in new.grid.rungs("length")
