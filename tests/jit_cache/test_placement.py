"""Servables over several devices: equal answers, stored and reloaded, one program for every form of input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from servax.jit_cache import Placement, Servable, SignatureError


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What `sharded_probe` found on eight virtual devices, in a process of its own."""
    folder = tmp_path_factory.mktemp("sharded")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    script = Path(__file__).parent / "sharded_probe.py"

    def run():
        command = [sys.executable, str(script), str(folder)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run(), run()


def test_S9_a_sharded_model_answers_as_on_one_device(probed):
    first, _ = probed
    assert first["count"] == 8
    for name in ("all", "first", "again", "last", "unstored"):
        assert first[name]["difference"] <= 1e-5, name
    assert first["all"]["shard"] == [16, 8]  # 32 columns over the four devices of the model axis
    assert first["first"]["devices"] == [0, 1, 2, 3]
    assert first["last"]["devices"] == [4, 5, 6, 7]


def test_S9_sharded_programs_are_stored_once_and_loaded_for_any_devices_alike(probed):
    first, second = probed
    assert first["all"]["store"] == first["first"]["store"] == [0, 4]
    assert first["again"]["store"] == first["last"]["store"] == [4, 0]
    for name in ("all", "first", "again", "last"):
        assert second[name]["store"] == [4, 0], name
        assert second[name]["difference"] <= 1e-5


def test_C4_one_value_in_every_form_and_place_runs_one_program(probed):
    for found in probed:
        assert found["forms"] == {"compiles": 0, "same": True}


def test_C10_two_sharded_programs_from_two_threads_do_not_wait_for_each_other(probed):
    for found in probed:
        assert found["threads"] == {"good": [200, 200], "hung": False}


def mesh_of_one():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def test_specs_are_checked_when_a_servable_is_made():
    with pytest.raises(SignatureError, match=r"axes of the mesh, \['data'\]; .*'rows'"):
        Placement(mesh_of_one(), PartitionSpec("rows"))
    with pytest.raises(SignatureError, match="are a prefix"):
        Servable(
            lambda params, x: x,
            {"w": np.ones(3, np.float32)},
            inputs={"x": "float32[4]"},
            placement=Placement(mesh_of_one(), {"v": PartitionSpec()}),
        )
    with pytest.raises(SignatureError, match="split another dim"):
        Servable(
            lambda params, x: x,
            {"w": np.ones(3, np.float32)},
            inputs={"x": "float32[4]"},
            placement=Placement(mesh_of_one(), PartitionSpec(None, "data")),
        )
