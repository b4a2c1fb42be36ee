"""Sizes as data: looped and switched programs give what static ones give."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from servax.bucketing import Bucket, Grid
from servax.jit_cache import InputError, OutputError, Servable, SignatureError, compile_program
from servax.jit_cache.placement import Placement
from servax.jit_cache.step_program import StepStaging, compile_stepped
from servax.jit_cache.stepped import StepPlan

AXES = ("batch", "length")
GRID = Grid.parse("1x4,3x4,2x8,1x16", AXES)


def embed(params, *, x, mask, positions, lengths):
    kept = jnp.where(mask, x * params["w"] + positions.astype(jnp.float32), 0.0)
    mean = jnp.sum(kept, axis=1) / jnp.maximum(lengths, 1).astype(jnp.float32)
    return {"mean": mean, "each": kept, "count": lengths}


def servable(**options):
    return Servable(
        embed,
        {"w": np.float32(3.0)},
        inputs={
            "x": "float32[length]",
            "mask": "mask[length]",
            "positions": "positions[length]",
            "lengths": "lengths[length]",
        },
        grid=GRID,
        **options,
    )


@pytest.fixture(scope="module")
def switched():
    one = servable()
    return one, compile_stepped(one, StepPlan(GRID.buckets, 4), one.place())


@pytest.fixture(scope="module")
def static():
    one = servable()
    leaves = one.place()
    return {bucket: compile_program(one, bucket, leaves) for bucket in GRID}


def expected(length, values):
    kept = 3.0 * values + np.arange(length, dtype=np.float32)
    return kept.mean(), kept


def rows_of(draw, bucket):
    count = draw(st.integers(0, bucket.rows))
    lengths = [draw(st.integers(1, bucket.item_sizes[0])) for _ in range(count)]
    return [{"x": np.arange(length, dtype=np.float32) + draw(st.integers(-9, 9))} for length in lengths]


@st.composite
def calls(draw):
    chosen = draw(st.lists(st.sampled_from(GRID.buckets), min_size=1, max_size=4))
    return [(bucket, rows_of(draw, bucket)) for bucket in chosen]


@given(st.lists(calls(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_list_of_steps_gives_each_row_its_own_answer(switched, batches):
    one, program = switched
    staging = StepStaging(one.signature, program.layout)
    for call in batches:  # the same buffers again and again: nothing may live into the next call
        for step, (bucket, items) in enumerate(call):
            staging.fill(step, bucket, items, [item["x"].shape for item in items])
        outputs = program(staging.close(len(call)))
        for step, (bucket, items) in enumerate(call):
            arrays = program.pieces(outputs, step, bucket)
            sizes = [item["x"].shape for item in items]
            for item, row in zip(items, one.outputs.cut(arrays, sizes), strict=True):
                found = dict(zip([leaf.name for leaf in one.outputs.leaves], row, strict=True))
                mean, kept = expected(len(item["x"]), item["x"])
                np.testing.assert_allclose(found["mean"], mean, rtol=1e-6)
                np.testing.assert_array_equal(found["each"], kept)
                assert found["count"] == len(item["x"])


def test_a_case_by_itself_is_bitwise_the_static_program(switched, static):
    _, program = switched
    rng = np.random.default_rng(0)
    for bucket in GRID:
        inputs = {
            "x": rng.normal(size=bucket.sizes).astype(np.float32),
            "mask": rng.random(bucket.sizes) < 0.7,
            "positions": np.broadcast_to(np.arange(bucket.item_sizes[0], dtype=np.int32), bucket.sizes),
            "lengths": np.full(bucket.rows, bucket.item_sizes[0], np.int32),
        }
        for mine, theirs in zip(program.case(bucket)(inputs), static[bucket](inputs), strict=True):
            np.testing.assert_array_equal(mine, np.asarray(theirs))


def test_a_loop_serves_every_batch_size_by_its_blocks():
    one = servable()
    block = Bucket(AXES, (2, 8))
    program = compile_stepped(one, StepPlan((block,), 4), one.place())
    staging = StepStaging(one.signature, program.layout)
    for blocks in (1, 3, 4, 2):
        items = [{"x": np.full(5, float(row), np.float32)} for row in range(2 * blocks)]
        for step in range(blocks):
            staging.fill(step, block, items[2 * step : 2 * step + 2], [(5,)] * 2)
        outputs = program(staging.close(blocks))
        means = np.concatenate([program.pieces(outputs, step, block)[-1] for step in range(blocks)])
        np.testing.assert_allclose(means, 3.0 * np.arange(2 * blocks) + 2.0)


def test_more_steps_than_there_are_rows_for_are_not_run(switched):
    one, program = switched
    staging = StepStaging(one.signature, program.layout)
    staging.fill(0, GRID.buckets[0], [{"x": np.ones(4, np.float32)}], [(4,)])
    outputs = program(staging.close(99))
    assert np.isfinite(program.pieces(outputs, 0, GRID.buckets[0])[0]).all()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [({}, "nothing"), ({"x": np.zeros((1, 5), np.float32)}, r"float32\[1, 5\]")],
)
def test_a_case_takes_its_own_sizes_only(switched, inputs, words):
    with pytest.raises(InputError, match=words):
        switched[1].case(GRID.buckets[0])(inputs)


def test_only_its_buckets_are_cases(switched):
    with pytest.raises(InputError, match="9x9"):
        switched[1].case(Bucket(AXES, (9, 9)))


@pytest.mark.parametrize(("cases", "steps"), [((), 1), ((GRID.buckets[0],) * 2, 1), (GRID.buckets, 0)])
def test_a_plan_has_cases_and_steps(cases, steps):
    with pytest.raises(SignatureError, match="at least one case"):
        StepPlan(tuple(cases), steps)


def test_a_mesh_runs_it_too():
    import jax

    with pytest.raises(SignatureError, match="explicit axes"):
        servable(placement=Placement(jax.make_mesh((1,), ("d",))), sizes="switched")
    mesh = jax.make_mesh((1,), ("d",), (AxisType.Auto,))
    one = servable(placement=Placement(mesh), sizes="switched")
    program = compile_stepped(one, StepPlan(GRID.buckets, 4), one.place())
    staging, bucket, values = (
        StepStaging(one.signature, program.layout),
        GRID.buckets[0],
        np.float32([1, 2, 5]),
    )
    staging.fill(0, bucket, [{"x": values}], [(3,)])
    outputs = program(staging.close(1))
    assert outputs[0].sharding.device_set == set(one.devices)
    (row,) = one.outputs.cut(program.pieces(outputs, 0, bucket), [(3,)])
    got = dict(zip([leaf.name for leaf in one.outputs.leaves], row, strict=True))
    mean, each = expected(3, values)
    np.testing.assert_allclose(got["mean"], mean, rtol=1e-6)
    np.testing.assert_array_equal(got["each"], each)


def test_a_case_that_loses_rows_is_refused():
    def halves(params, *, x):
        return x if x.shape[0] == 1 else x[::2]

    one = Servable(halves, np.float32(1), inputs={"x": "float32[length]"}, grid=GRID, outputs={})
    with pytest.raises((OutputError, SignatureError)):
        compile_stepped(one, StepPlan(GRID.buckets, 2), one.place())
