"""The fleet: nobody is lost whatever befalls, one replica is the single device, routers do as they say."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid, Ladder
from servax.experiments import scale
from servax.experiments.errors import Stalled
from servax.experiments.fleet import Autoscaler, Fault, Fleet, Replica
from servax.experiments.routers import Bands, Random, Two
from servax.experiments.simulate import grid_batcher, simulate
from servax.server.batching.batcher import Batcher

GRID = Grid.product({"batch": Ladder((1, 2, 4)), "length": Ladder((4, 7, 20))})


def cost(bucket: Bucket) -> float:
    return 0.5 + 0.01 * bucket.elements


def batcher() -> Batcher:
    return grid_batcher(GRID, cost)


faults = st.builds(
    Fault, at_s=st.floats(0, 30), replica=st.integers(1, 3), kind=st.sampled_from(["crash", "hang"]),
    seconds=st.floats(0.1, 5),
)  # fmt: skip
traffic = st.lists(st.tuples(st.integers(1, 20), st.floats(0, 2)), min_size=1, max_size=50)


def arrays(load: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    lengths, gaps = zip(*load, strict=True)
    return np.array(lengths, np.int64), np.cumsum(gaps)


@settings(max_examples=40)
@given(traffic, st.lists(faults, max_size=4), st.sampled_from([Random(), Two()]), st.booleans())
def test_every_request_is_answered_once_whatever_befalls(
    load: list[tuple[int, float]], struck: list[Fault], router: Random | Two, growing: bool
) -> None:
    lengths, arrivals = arrays(load)
    rule = Autoscaler(interval_s=1.0, target=0.6, start_s=2.0, waiting=2) if growing else None
    replicas = [Replica(batcher) for _ in range(4)]
    run = Fleet(replicas, router, cost, faults=struck, autoscaler=rule).run(lengths, arrivals)
    assert np.isfinite(run.done_s).all()
    assert (run.latency_s >= cost(Bucket(("batch", "length"), (1, 4))) - 1e-9).all()
    assert run.real == lengths.sum()
    assert 0 <= run.waste < 1
    assert all(not one.held and one.load == 0 for one in replicas)


@given(traffic)
def test_a_fleet_of_one_is_the_single_device(load: list[tuple[int, float]]) -> None:
    lengths, arrivals = arrays(load)
    one = simulate(lengths, arrivals, batcher(), cost)
    many = Fleet([Replica(batcher)], Random(), cost).run(lengths, arrivals)
    # Requests that come at the same instant are seen one by one by a fleet's replica, together by the device.
    if len(set(arrivals.tolist())) == len(arrivals):
        np.testing.assert_allclose(many.done_s, one.done_s)


def test_two_takes_the_less_loaded() -> None:
    busy, idle = Replica(batcher), Replica(batcher)
    busy.load = 5
    assert Two().pick(1, [[busy, idle]], itertools.cycle([0.0, 0.9]).__next__) is idle


def test_a_band_that_is_gone_is_served_by_the_next_larger() -> None:
    small, large = Replica(batcher), Replica(batcher, 1)
    router = Bands((7, 20))
    assert router.pick(7, [[small], [large]], lambda: 0.0) is small
    assert router.pick(8, [[small], [large]], lambda: 0.0) is large
    assert router.pick(7, [[], [large]], lambda: 0.0) is large
    with pytest.raises(Stalled, match="band 1 has none"):
        router.pick(8, [[small], []], lambda: 0.0)


def test_a_common_start_is_bounded_by_the_stores_link() -> None:
    few, many = scale.start((1, 1000))
    assert few["store_s"] < few["compile_s"]
    assert many["store_weights_s"] > many["compile_s"] == few["compile_s"]


def test_quick_run_holds_its_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(quick: bool, seed: int) -> dict[str, list[dict[str, object]]]:
        world = scale.World(scale.CPU, seed)
        return {
            "routing": scale.routing(world, (8, 24), 0.7, 1.0),
            "faults": scale.faults(world, 8, 0.5, 1.0),
            "surge": scale.surge(world, 1, (1.0, 40.0), 40.0),
            "start": scale.start((1, 10)),
            "million": scale.million(seed, 2e4, 0.5, 0.05),
            "one process": [{"devices": 8, "requests_per_s": 400.0, "times": 8.0, "busy": 1.0}],
        }

    monkeypatch.setattr(scale, "measure", small)
    scale.main(json_file=tmp_path / "scale.json", figures=tmp_path, quick=True, seed=0)
    found = json.loads((tmp_path / "scale.json").read_text())
    last = {row["router"]: row for row in found["routing"][-4:]}
    assert last["two"]["p99_ms"] < last["random"]["p99_ms"]
    assert last["bands, fine"]["waste"] < last["two"]["waste"]
    assert last["bands"]["programs"] * 4 == last["two"]["programs"]
    quick, _, slow, _ = found["surge"]
    assert quick["late"] < slow["late"]
    assert (tmp_path / "scale.png").stat().st_size > 10_000
