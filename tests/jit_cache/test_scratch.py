"""What libraries take of a CPU's memory, measured before there are weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Program, Servable, compile_program
from servax.jit_cache.hlo_scratch import library_scratch
from servax.jit_cache.scratch import scratch_without_weights

MIB = 1 << 20
SIZE = 1024
BUCKET = Bucket(("batch",), (8,))

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not Path("/proc/self/clear_refs").exists(),
    reason="measures host memory",
)


def servable(apply: Any, size: int = SIZE) -> Servable:
    weights = {"w": jax.ShapeDtypeStruct((size, size), jnp.float32)}
    return Servable(apply, weights, inputs={"x": f"float32[{size}]"}, limits={"batch": 8})


def compiled(model: Servable) -> dict[Bucket, Program]:
    return {BUCKET: compile_program(model, BUCKET, model.abstract_leaves)}


def product(params: Any, *, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def until(params: Any, *, x: Any) -> Any:
    """Ends only if the weights are large enough."""
    return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y + jnp.abs(params["w"][0]), x)


def test_weights_of_zero_take_no_memory() -> None:
    # In a process of its own: what other tests left running takes memory too.
    script = """
import jax, numpy
from servax.jit_cache import Servable
from servax.jit_cache.device_memory import peak_bytes
from servax.jit_cache.scratch import zero_leaves

def product(weights, *, x):
    return x @ weights["w"]

weights = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
model = Servable(product, weights, inputs={"x": "float32[4096]"}, limits={"batch": 8})
leaves = []
took = peak_bytes(lambda: leaves.extend(zero_leaves(model)))
assert leaves[0].shape == (4096, 4096) and not numpy.asarray(leaves[0][0, :8]).any()
print(took, model.weights_bytes)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    took, weights = map(int, done.stdout.split())
    assert took < 16 * MIB < weights


def test_a_run_without_weights_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = servable(product)
    programs = compiled(model)
    facts = programs[BUCKET].facts

    def peak(call: Any) -> int:
        call()
        return 5 * MIB + facts.temp_bytes + facts.output_bytes

    monkeypatch.setattr("servax.jit_cache.scratch.peak_bytes", peak)
    assert scratch_without_weights(model, programs, most_bytes=1 << 40) == {BUCKET: 5 * MIB}


@pytest.mark.parametrize(("apply", "most"), [(until, 1 << 40), (product, 0)])
def test_what_may_not_end_or_not_fit_is_estimated(
    apply: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servax.jit_cache.scratch.peak_bytes", lambda call: pytest.fail("was run"))
    model = servable(apply)
    programs = compiled(model)
    estimate = library_scratch(programs[BUCKET].executable.as_text())
    assert scratch_without_weights(model, programs, most_bytes=most) == {BUCKET: estimate}


@pytest.mark.parametrize(("name", "value"), [("host_free_bytes", lambda: MIB), ("_MOST_S", 0.0)])
def test_what_the_machine_has_no_room_or_the_plan_no_time_for_is_estimated(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servax.jit_cache.scratch.peak_bytes", lambda call: pytest.fail("was run"))
    monkeypatch.setattr(f"servax.jit_cache.scratch.{name}", value)
    model = servable(product)
    programs = compiled(model)
    estimate = library_scratch(programs[BUCKET].executable.as_text())
    assert scratch_without_weights(model, programs, most_bytes=1 << 40) == {BUCKET: estimate}


def test_a_run_that_fails_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: Any) -> int:
        raise RuntimeError("no")

    monkeypatch.setattr("servax.jit_cache.scratch.peak_bytes", fail)
    model = servable(product)
    programs = compiled(model)
    estimate = library_scratch(programs[BUCKET].executable.as_text())
    assert scratch_without_weights(model, programs, most_bytes=1 << 40) == {BUCKET: estimate}


def test_little_is_not_told_from_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servax.jit_cache.scratch.peak_bytes", lambda call: 4096)
    monkeypatch.setattr("servax.jit_cache.scratch.library_scratch", lambda text: 300)
    model = servable(product, 64)
    assert scratch_without_weights(model, compiled(model), most_bytes=1 << 40) == {BUCKET: 300}
