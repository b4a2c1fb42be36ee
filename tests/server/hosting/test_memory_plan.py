"""Programs and weights that must fit the memory of the device."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Servable, WarmupError, compile_program
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.hosting.programs import Programs

KIB = 1024


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

    monkeypatch.setattr("servax.server.hosting.probing.peak_bytes", peak)
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
