"""Programs that are in memory already are taken from there, as long as somebody holds them."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from servax.bucketing import Bucket
from servax.jit_cache import Placement, Program, Servable, StoredPrograms
from servax.jit_cache.stepped import StepPlan


def scaled(params: Any, x: Any) -> Any:
    return {"y": x * params["scale"] + params["shift"]}


def make(scale: float, *, dtype: Any = np.float32, apply: Any = scaled) -> Servable:
    params = {"scale": np.float32(scale), "shift": dtype(0.5)}
    return Servable(apply, params, inputs={"x": "float32[n]"}, limits={"n": 8, "batch": 2})


def program(source: StoredPrograms, servable: Servable) -> Program:
    bucket = Bucket.parse("2x8", servable.grid.axes)
    source.infer_outputs(servable)
    return source(servable, bucket, [jax.device_put(leaf) for leaf in servable.leaves])


@given(scales=st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=4))
def test_each_runs_the_shared_program_over_its_own_weights(scales: list[float]) -> None:
    source = StoredPrograms(None)
    made = [program(source, make(scale)) for scale in scales]
    assert [one.facts.source for one in made] == ["compiled"] + ["shared"] * (len(scales) - 1)
    assert len({id(one.executable) for one in made}) == 1
    for one, scale in zip(made, scales, strict=True):
        got = np.asarray(one({"x": np.ones((2, 8), np.float32)})[0])
        np.testing.assert_allclose(got, np.float32(scale) + 0.5, rtol=1e-6)


def test_the_second_traces_nothing_and_its_run_time_is_known(compiles: Any) -> None:
    source = StoredPrograms(None)
    first = make(1.0)
    held = program(source, first)
    source.measured(first, held.bucket, 0.25)
    later = make(2.0)
    with compiles.none():
        second = program(source, later)
    assert (second.facts.run_s, second.facts.ready_s) == (0.25, 0.0)
    assert second.facts.flops == held.facts.flops


def test_other_code_and_other_shapes_are_other_programs() -> None:
    source = StoredPrograms(None)
    held = program(source, make(1.0))
    others = [
        make(1.0, apply=lambda params, x: {"y": x * params["scale"] - params["shift"]}),
        make(1.0, dtype=np.float16),
    ]
    sources = [program(source, one).facts.source for one in others]
    assert held.facts.source == "compiled"
    assert sources == ["compiled", "compiled"]


def test_outputs_of_other_declarations_are_not_taken_over() -> None:
    def first_of(a: Any, b: Any) -> Any:
        return a * 2.0 + 0 * b.sum()

    def two(dims: str, other: str) -> Servable:
        return Servable(
            first_of,
            inputs={"a": f"float32[{dims}]", "b": f"float32[{other}]"},
            limits={"m": 8, "n": 8, "batch": 1},
            scheme={"m": [8], "n": [8], "batch": [1]},
        )

    source = StoredPrograms(None)
    made = [two("m", "n"), two("n", "m")]
    for one in made:
        source.infer_outputs(one)
    # The axes come in the order in which they appear.
    assert [one.outputs.leaves[0].dims for one in made] == [("m",), ("n",)]


def test_nothing_is_kept_that_nobody_holds() -> None:
    source = StoredPrograms(None)
    held = program(source, make(1.0))
    del held
    gc.collect()
    assert program(source, make(1.0)).facts.source == "compiled"


def test_code_without_a_key_is_compiled_each_time() -> None:
    generator = (one for one in [1])  # only its address identifies it

    def apply(params: Any, x: Any) -> Any:
        return {"y": x * params["scale"] if generator else x}

    source = StoredPrograms(None)
    made = [program(source, make(1.0, apply=apply)) for _ in range(2)]
    assert [one.facts.source for one in made] == ["compiled", "compiled"]


def test_steps_of_other_shapes_are_other_programs() -> None:
    def summed(x: Any) -> Any:
        return {"y": jnp.cumsum(x, axis=1)}

    source, held = StoredPrograms(None), []
    for dims in ("n, 4", "4, n"):  # rows of steps are flat, and equally long for both
        servable = Servable(
            summed,
            inputs={"x": f"float32[{dims}]"},
            limits={"n": 8, "batch": 1},
            scheme={"n": [2, 8], "batch": [1]},
            sizes="switched",
        )
        held.append(source.stepped(servable, StepPlan(servable.grid.buckets, 2), []))
        bucket = servable.grid.buckets[-1]
        shape = servable.program_inputs(bucket)["x"].shape
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(held[-1].case(bucket)({"x": x})[0], np.cumsum(x, axis=1))
    assert [one.facts.source for one in held] == ["compiled", "compiled"]


def test_a_mesh_counts_without_parameters_too() -> None:
    def on(kind: AxisType) -> Servable:
        mesh = jax.make_mesh((1,), ("d",), (kind,), devices=jax.devices()[:1])
        return Servable(lambda x: -x, inputs={"x": "float32[4]"}, placement=Placement(mesh))

    source = StoredPrograms(None)
    keys = [
        source.fingerprint(one, one.grid.buckets[0]) for one in map(on, (AxisType.Auto, AxisType.Explicit))
    ]
    assert None not in keys
    assert keys[0] != keys[1]


def test_a_class_that_a_factory_makes_anew_is_the_same_structure() -> None:
    def make_one() -> Servable:
        class Answer(tuple):
            """Of this call of the factory."""

            __slots__ = ()

        jax.tree_util.register_pytree_node(
            Answer, lambda one: (tuple(one), None), lambda _, parts: Answer(parts)
        )
        return Servable(lambda x: Answer([x * 2.0]), inputs={"x": "float32[n]"}, limits={"n": 8, "batch": 2})

    source, made = StoredPrograms(None), [make_one(), make_one()]
    for one in made:
        source.infer_outputs(one)
    assert made[0].outputs is made[1].outputs
    for number, sizes in enumerate(("1x8", "2x8")):  # what is not in memory is compiled, and checked
        assert source(made[number], Bucket.parse(sizes, made[0].grid.axes), []).facts.source == "compiled"
