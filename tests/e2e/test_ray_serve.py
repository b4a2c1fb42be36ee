"""Replicas in Ray Serve: the same routes, a shared store, one killed under load."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from servax.server.ray_serve import QUEUED, RUNNING, application, scale_on_queue

MODEL = """
import jax.numpy as jnp
import numpy as np
import servax


def total(params, x, mask):
    return {"sum": params * jnp.where(mask, x, 0.0).sum(1)}


toy = servax.Servable(
    total,
    np.float32(2),
    inputs={"x": "float32[length]", "mask": "mask[length]"},
    limits={"length": 32, "batch": 4},
    scheme="powers_of_two:16",
    name="toy",
)
"""


def test_a_replica_is_killed_under_load_and_nothing_is_lost(tmp_path):
    pytest.importorskip("ray", reason="needs servax[ray]")
    (tmp_path / "ray_toy.py").write_text(MODEL)
    script = Path(__file__).with_name("ray_cluster.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["before"], found["after"]) == (2, 2)
    assert (found["http"], found["again"]) == ([6.0], [10.0])
    outcomes = Counter(found["outcomes"])
    # What was on the killed replica failed by name; everything else was answered, and rightly.
    assert not {"lost", "wrong"} & outcomes.keys(), outcomes
    assert outcomes["right"] >= 100, outcomes
    assert set(outcomes) - {"right"} <= {"ActorDiedError", "ActorUnavailableError", "RayActorError"}, outcomes
    assert list((tmp_path / "store").rglob("*")), "replicas share a store"


@pytest.mark.parametrize(("queued", "running", "wanted"), [(0, 0, 1), (5, 4, 1), (15, 6, 3), (1000, 0, 4)])
def test_replicas_follow_the_rows_that_wait(queued, running, wanted):
    context = SimpleNamespace(
        aggregated_metrics={QUEUED: {"a": queued, "b": 0}, RUNNING: {"a": running}},
        config=SimpleNamespace(target_ongoing_requests=10),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert scale_on_queue(context) == (wanted, {})


def test_options_are_checked_before_anything_is_deployed():
    with pytest.raises(ValueError, match="max_wait_ms"):
        application(model="minilm", max_wait_ms=-1)
