"""A program of replicas is compiled once and loaded in the other places, at a start and at the next one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `copies_probe` found on four virtual devices, in a process of its own."""
    script = Path(__file__).with_name("copies_probe.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    flags["PYTHONPATH"] = str(script.parents[1])  # of toy_layers
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("copies") / "here")],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


COPIES = ["compiled", "copied", "copied", "copied"]


def test_every_place_answers_the_same_bits_and_runs_on_its_own_devices(found):
    one = found["alone"]["sum"]
    for name, start in found.items():
        assert start["same"], name
        if name not in ("inverse", "callback", "spread", "spread_again"):
            assert start["sum"] == one, name
    for name in ("memory", "first", "again", "refused", "refused_store", "bound", "bound_again"):
        assert found[name]["where"] == [[0], [1], [2], [3]], name
    assert found["backwards"]["where"] == [[3], [2], [1], [0]]
    assert found["spread"]["where"] == [[0, 1], [2, 3]]
    assert found["spread_again"]["where"] == [[2, 3], [0, 1]]


def test_a_program_is_compiled_once_for_all_places_without_a_store_and_with_one(found):
    for name in ("memory", "first"):
        assert found[name]["compiles"] == found["alone"]["compiles"] == {"warmup": 2}, name
        assert found[name]["sources"] == COPIES, name
    assert found["stepped"]["compiles"] == {"warmup": 1}
    assert found["stepped"]["sources"] == COPIES
    assert found["spread"]["compiles"] == {"warmup": 2}
    assert found["spread"]["sources"] == ["compiled", "copied"]
    assert found["inverse"]["sources"] == COPIES  # calls a native library


def test_S9_all_places_have_one_entry_and_the_next_start_compiles_nothing_in_any_order(found):
    assert found["first"]["entries"] == 2
    for name in ("again", "backwards", "spread_again"):
        assert found[name]["compiles"] == {}, name
        assert set(found[name]["sources"]) == {"store"}, name
        assert found[name]["store"] == [2, 0], name


def test_what_cannot_be_written_down_is_compiled_in_each_place_with_one_warning(found):
    start = found["callback"]
    assert start["compiles"] == {"warmup": 8}
    (warning,) = start["warnings"]
    assert "is compiled for each place" in warning
    assert "calls back into Python" in warning


def test_S9_where_the_runtime_does_not_move_programs_each_place_compiles_its_own_and_entries_stay(found):
    alone, stored, intact = found["refused"], found["refused_store"], found["intact"]
    assert alone["compiles"] == {"warmup": 9}  # the one that was tried among them
    assert stored["compiles"] == {"warmup": 6}
    assert set(alone["sources"]) == {"compiled"}
    assert stored["sources"] == ["store", "compiled", "compiled", "compiled"]
    for start in (alone, stored):
        assert all("one that was tried failed with" in warning for warning in start["warnings"])
        assert start["warnings"]
    assert intact["sources"] == ["store"] * 4


def test_S9_where_programs_are_bound_to_devices_each_place_has_an_entry_of_its_own(found):
    first, again = found["bound"], found["bound_again"]
    assert first["store"] == [0, 8]
    assert again["store"] == [8, 0]
    assert again["compiles"] == {}
    assert first["warnings"] == ["each program is compiled 4 times: those of cpu are not moved"]
