"""Programs: compiled ahead of time, over what is used, never again."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from servax.bucketing import Bucket
from servax.jit_cache import (
    CompileError,
    InputError,
    OutputError,
    Servable,
    SignatureError,
    compile_program,
    process_sealed,
    seal_process,
    unseal_process,
)

pytestmark = pytest.mark.usefixtures("strict_numerics")
X = {"x": "float32[length]"}
OPTIONS = {"inputs": X, "limits": {"length": 32, "batch": 4}}
BUCKET = Bucket(("batch", "length"), (2, 8))


def compiled(apply, params=None, **options):
    servable = Servable(apply, params, **(OPTIONS | options))
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    return compile_program(servable, Bucket(servable.grid.axes, BUCKET.sizes), leaves)


def test_a_program_knows_its_function():
    servable = Servable(lambda x: x, variants={"again": lambda x: x + 0}, **OPTIONS)
    program = compile_program(servable.as_variant("again"), Bucket(servable.grid.axes, BUCKET.sizes), [])
    assert program.variant == "again"


def test_a_program_runs_without_tracing(compiles):
    program = compiled(lambda p, x: {"y": x * p, "s": x.sum(1)}, jnp.float32(3))
    inputs = {"x": np.arange(16, dtype=np.float32).reshape(2, 8)}
    with compiles.none():
        for _ in range(3):
            sums, scaled = program(inputs)
    np.testing.assert_array_equal(scaled, inputs["x"] * 3)
    np.testing.assert_array_equal(sums, inputs["x"].sum(1))


def test_facts_are_kept():
    inputs = {"x": "float32[length, 8]"}
    facts = compiled(lambda p, x: x @ p, np.ones((8, 8), np.float32), inputs=inputs).facts
    assert facts.compile_s > 0
    assert facts.flops >= 2 * 2 * 8 * 8 * 8
    assert facts.argument_bytes == 4 * (64 + 2 * 8 * 8)
    assert facts.output_bytes == 4 * 2 * 8 * 8


def test_C2_another_shape_or_dtype_raises_and_compiles_nothing(compiles):
    program = compiled(lambda x: x * 2)
    with compiles.none():
        with pytest.raises(
            InputError, match=r"here batch=2, length=8; .*'x'.* float32\[2,8\] .* float32\[2,9\]"
        ):
            program({"x": np.zeros((2, 9), np.float32)})
        with pytest.raises(InputError, match=r"'x'.* float32\[2,8\] .* int32\[2,8\]"):
            program({"x": np.zeros((2, 8), np.int32)})
        with pytest.raises(InputError, match="'x' is missing"):
            program({})


def test_a_failing_trace_is_quoted_and_chained():
    def apply(x):
        raise ValueError("no such layer\nsecond line")

    with pytest.raises(
        CompileError, match=r"'broken' must compile .* 2x8 failed with ValueError: no such layer$"
    ) as caught:
        compiled(apply, name="broken")
    assert isinstance(caught.value.__cause__, ValueError)


def test_python_control_flow_on_values_is_named():
    with pytest.raises(CompileError, match="TracerBoolConversionError"):
        compiled(lambda x: x if x.sum() > 0 else -x)


BIG = np.ones((1024, 1024), np.float32)


@pytest.mark.parametrize("weight", [BIG, jnp.asarray(BIG)], ids=["numpy", "jax"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_S10_closed_over_weights_are_refused(weight, wrap, compiles):
    apply = wrap(lambda x: x @ weight)
    before = compiles.count
    with pytest.raises(SignatureError, match=r"'m' closes over 4194304 bytes .*float32\[1024, 1024\]. Pass"):
        compiled(apply, inputs={"x": "float32[length, 1024]"}, name="m")
    assert compiles.count == before


def test_S10_small_constants_may_be_closed_over():
    mask = np.tril(np.ones((8, 8), np.float32))
    program = compiled(lambda x: x @ mask, inputs={"x": "float32[length, 8]"})
    (got,) = program({"x": np.ones((2, 8, 8), np.float32)})
    np.testing.assert_array_equal(got, np.ones((2, 8, 8)) @ mask)


def test_S10_new_weights_of_the_same_shape_keep_the_programs(compiles):
    """And an entry of the store holds no weights: under 1 MB beside a 4 MB weight."""
    servable = Servable(lambda p, x: x[..., None] @ p["w"][:1], {"w": BIG, "unused": BIG}, **OPTIONS)
    buckets = servable.grid.buckets
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    programs = [compile_program(servable, bucket, leaves) for bucket in buckets]
    assert len(programs) == 9
    fresh = [jax.device_put(leaf * 2) for leaf in servable.leaves]
    with compiles.none():
        for bucket, program in zip(buckets, programs, strict=True):
            (got,) = program.with_leaves(fresh)({"x": np.ones(bucket.sizes, np.float32)})
            np.testing.assert_array_equal(got, np.full((*bucket.sizes, 1024), 2.0))
    assert len(serialize_executable.serialize(programs[-1].executable)[0]) < 1 << 20


def test_unused_parameters_and_inputs_are_left_out(compiles):
    params = {f"w{i:02}": np.full(4, i, np.float32) for i in range(77)}
    inputs = {"ids": "int32[length]", "mask": "mask[length]", "x": "float32[length]"}
    program = compiled(lambda p, ids, mask, x: x * p["w03"][0] + p["w40"][1], params, inputs=inputs)
    assert program.used_leaves == (3, 40)
    assert program.used_inputs == ("x",)
    given = {
        "ids": np.zeros((2, 8), np.int32),
        "mask": np.zeros((2, 8), bool),
        "x": np.ones((2, 8), np.float32),
    }
    with compiles.none():
        np.testing.assert_array_equal(program(given)[0], np.full((2, 8), 43.0))


def test_a_nested_jit_that_takes_everything_is_looked_into():
    params = {"used": np.float32(2), "dead": np.ones((64, 64), np.float32), "key": jax.random.key(0)}
    program = compiled(jax.jit(lambda p, x: x * p["used"]), params)
    assert program.used_leaves == (2,)  # leaves in the order of their keys: dead, key, used
    np.testing.assert_array_equal(program({"x": np.ones((2, 8), np.float32)})[0], np.full((2, 8), 2.0))
    assert program.facts.argument_bytes == 4 + 4 * 16


def test_a_program_that_uses_nothing():
    program = compiled(lambda p, x: jnp.ones(x.shape), np.float32(1))
    assert (program.used_leaves, program.used_inputs) == ((), ())
    np.testing.assert_array_equal(program({"x": np.zeros((2, 8), np.float32)})[0], np.ones((2, 8)))


def test_a_parameter_used_in_some_buckets_only():
    """Each bucket is pruned by its own trace: what is dead in one may be alive in the next."""

    def apply(p, x):
        return x * (p["short"] if int(x.shape[1]) <= 8 else p["long"])

    servable = Servable(apply, {"long": 3.0, "short": 2.0}, **OPTIONS)
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    for length, factor in ((8, 2.0), (16, 3.0)):
        bucket = Bucket(("batch", "length"), (1, length))
        (got,) = compile_program(servable, bucket, leaves)({"x": np.ones((1, length), np.float32)})
        np.testing.assert_array_equal(got, np.full((1, length), factor))


def test_random_state_may_be_a_parameter():
    def apply(p, x):
        return x + jax.random.uniform(p["key"], (1, 1)) * p["scale"]

    program = compiled(apply, {"key": jax.random.key(0), "scale": np.float32(0), "spare": jax.random.key(1)})
    np.testing.assert_array_equal(program({"x": np.ones((2, 8), np.float32)})[0], np.ones((2, 8)))


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda x: x[:1] if int(x.shape[1]) == 8 and int(x.shape[0]) == 2 else x, "expected 2 rows, got 1"),
        (lambda x: (x, x) if x.shape == (2, 8) else x, "same structure at every size"),
        (lambda x: x[:, :4] if x.shape == (2, 8) else x, r"expected float32\[8\] for the largest item"),
        (lambda x: x > 0 if x.shape == (2, 8) else x, r"expected float32\[8\].*got bool\[8\]"),
    ],
)
def test_P6_a_bucket_that_returns_something_else_is_refused_before_it_runs(apply, message):
    with pytest.raises(OutputError, match=message):
        compiled(apply)


def test_programs_run_while_the_process_is_sealed():
    program = compiled(lambda x: x + 1)
    seal_process()
    try:
        assert process_sealed()
        np.testing.assert_array_equal(program({"x": np.zeros((2, 8), np.float32)})[0], np.ones((2, 8)))
    finally:
        unseal_process()


def test_an_executable_holds_no_type_of_the_user():
    """Lists and strings only, so that it can be stored and loaded where that type is unknown."""
    from typing import NamedTuple

    class Out(NamedTuple):
        y: jax.Array

    program = compiled(lambda p, x: Out(x * p.y), Out(np.float32(2)))
    _, in_tree, out_tree = serialize_executable.serialize(program.executable)
    assert "Out" not in f"{in_tree}{out_tree}"


def test_C8_nothing_keeps_a_model_alive_after_its_programs():
    class Function:
        def __call__(self, p, x):
            return x * p["used"]

    function = Function()
    program = compiled(function, {"used": np.float32(2), "dead": np.float32(3)})
    watch = weakref.ref(function), weakref.ref(program.executable)
    del function, program
    gc.collect()
    assert [one() for one in watch] == [None, None]


def test_the_work_of_scanned_layers_counts_as_often_as_they_run():
    def scanned(weights, *, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def unrolled(weights, *, x):
        for layer in range(6):
            x = jnp.tanh(x @ weights[layer])
        return x

    weights = jnp.zeros((6, 64, 64), jnp.float32)
    found = []
    for apply in (scanned, unrolled):
        servable = Servable(apply, weights, inputs={"x": "float32[64]"}, limits={"batch": 8})
        facts = compile_program(servable, Bucket(("batch",), (8,)), servable.place()).facts
        assert facts.flops == pytest.approx(6 * 2 * 8 * 64 * 64, rel=0.05)
        found.append(facts.bytes_accessed)
    assert found[0] == pytest.approx(found[1], rel=0.5)
