"""One copy of every program on each device; in a process that has several."""

import os
import subprocess
import sys

import pytest
from servax.jit_cache import Servable, SignatureError
from servax.jit_cache.replicas import Replicas

SCRIPT = """
import pathlib, sys
import jax, numpy as np
from servax.bucketing import Bucket
from servax.jit_cache import Servable, StoredPrograms
from servax.jit_cache.replicas import Replicas, on_replica
from servax.jit_cache.store import Store

servable = Servable(
    lambda params, x: x @ params, np.eye(4, dtype=np.float32) * 3,
    inputs={"x": "float32[4]"}, limits={"batch": 2},
)
inner = StoredPrograms(Store.open(pathlib.Path(sys.argv[1]), home=pathlib.Path(sys.argv[1] + "-home")))
replicas = Replicas(jax.devices(), inner)
assert len(replicas.devices) == 4
bucket = Bucket(("batch",), (2,))
leaves = servable.place()
program = replicas(servable, bucket, leaves)
again = replicas(servable, Bucket(("batch",), (1,)), leaves)
x = np.ones((2, 4), np.float32)
for index, device in enumerate(jax.devices()):
    with on_replica(index):
        (out,) = program({"x": x})
        assert out.devices() == {device}, out.devices()
        assert np.array_equal(out, 3 * x)
assert all(copy._arguments[0] is other._arguments[0] for copy, other in zip(program._copies, again._copies))
other = program.with_leaves([jax.numpy.eye(4) * 5])
with on_replica(3):
    assert np.array_equal(other({"x": x})[0], 5 * x)
    assert np.array_equal(program({"x": x})[0], 3 * x)
print([copy.facts.source for copy in program._copies])
"""


def run(*arguments):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_device_runs_its_own_copy_over_its_own_weights_and_from_the_store(tmp_path):
    assert "compiled" in run(str(tmp_path / "store"))[0]
    assert "compiled" not in run(str(tmp_path / "store"))[0]


def test_replicas_are_on_distinct_devices():
    with pytest.raises(SignatureError, match="distinct devices"):
        Replicas([], lambda *_: None)


def test_a_model_that_runs_several_batches_a_call_is_refused():
    import jax

    servable = Servable(lambda x: x, inputs={"x": "float32[length]"}, limits={"length": 8}, sizes="switched")
    with pytest.raises(SignatureError, match="static programs"):
        Replicas(jax.devices()[:1], lambda *_: None).check(servable)
