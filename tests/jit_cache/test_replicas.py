"""One copy of every program on each device; in a process that has several."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from servax.bucketing import Bucket
from servax.jit_cache import Placement, Servable, SignatureError, compile_program
from servax.jit_cache.replicas import Replicas, devices_each

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
assert len(replicas.places) == 4
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


def test_each_replica_takes_as_many_devices_as_the_mesh_of_its_model():
    one = Servable(
        lambda x: x,
        inputs={"x": "float32[4]"},
        placement=Placement(Mesh(np.array(jax.devices()[:1]), ("data",))),
    )
    plain = Servable(lambda x: x, inputs={"x": "float32[4]"})
    assert devices_each([one, plain]) == devices_each([plain]) == 1
    with pytest.raises(SignatureError, match="each replica takes 2 devices"):
        Replicas(jax.devices()[:1], lambda *_: None, each=2)


def test_what_a_store_remembers_of_the_first_copy_counts_for_all():
    told = []

    class Remembers:
        def __call__(self, servable, bucket, leaves):
            raise AssertionError

        def timed(self, servable, bucket, plan):
            told.append(("timed", servable.devices, bucket, plan))
            return 0.5

        def measured(self, servable, bucket, run_s, plan):
            told.append(("measured", servable.devices, bucket, run_s))

    servable = Servable(lambda x: x, inputs={"x": "float32[4]"})
    bucket, devices = servable.grid.buckets[0], tuple(jax.devices()[:1])
    replicas = Replicas(devices, Remembers())
    assert replicas.timed(servable, bucket) == 0.5
    replicas.measured(servable, bucket, 0.25)
    assert replicas.scratch(servable, bucket) is None
    assert told == [("timed", devices, bucket, None), ("measured", devices, bucket, 0.25)]
    assert Replicas(devices, lambda *_: None).timed(servable, bucket) is None


def test_a_version_that_keeps_some_weights_gets_its_others():
    servable = Servable(
        lambda params, x: x * params["a"] + params["b"],
        {"a": np.full(4, 3, np.float32), "b": np.zeros(4, np.float32)},
        inputs={"x": "float32[4]"},
        limits={"batch": 1},
    )
    leaves = servable.place()
    program = Replicas(jax.devices()[:1], compile_program)(servable, Bucket(("batch",), (1,)), leaves)
    x = np.ones((1, 4), np.float32)
    later = program.with_leaves([leaves[0], jax.numpy.full(4, 5.0)])
    np.testing.assert_array_equal(later({"x": x})[0], 8 * x)
    np.testing.assert_array_equal(program({"x": x})[0], 3 * x)
