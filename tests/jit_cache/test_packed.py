"""The packed layout: each item gets the answer it gets alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid
from servax.jit_cache import InputError, OutputError, Servable, SignatureError, compile_program
from servax.jit_cache.errors import UnsafePaddingError
from servax.jit_cache.packed import PackedServable
from servax.jit_cache.safety_packed import require_packed_safe

AXES = ("batch", "length")
GRID = Grid.parse("1x8,2x8,2x16", AXES)
SEGMENTS = 4


def padded(params, *, x, scale, mask):
    kept = jnp.where(mask, x * params, 0.0)
    places = jnp.arange(x.shape[1], dtype=jnp.float32)[None]
    total = scale * jnp.sum(kept + jnp.where(mask, places, 0.0), axis=1)
    return {"sum": total, "each": kept}


def packed(params, *, x, scale, segment_ids, positions):
    real = segment_ids > 0
    kept = jnp.where(real, x * params, 0.0)
    mine = segment_ids[:, None, :] == jnp.arange(1, SEGMENTS + 1, dtype=jnp.int32)[None, :, None]
    places = jnp.where(real, positions, 0).astype(jnp.float32)
    return {"sum": scale * jnp.sum(jnp.where(mine, (kept + places)[:, None], 0.0), axis=2), "each": kept}


def base(**options):
    return Servable(
        padded,
        np.float32(2),
        inputs={"x": "float32[length]", "scale": "float32[]", "mask": "mask[length]"},
        grid=GRID,
        **options,
    )


@pytest.fixture(scope="module")
def programs():
    one = PackedServable(base(), packed, max_segments=SEGMENTS)
    leaves = one.place()
    return one, {bucket: compile_program(one, bucket, leaves) for bucket in GRID}


def items_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=length).astype(np.float32), "scale": np.float32(index + 1)}
        for index, length in enumerate(lengths)
    ]


def run(programs, bucket, items, staging=None):
    one, made = programs
    staging = one.staging(bucket) if staging is None else staging
    sizes = [item["x"].shape for item in items]
    outputs = [np.asarray(leaf) for leaf in made[bucket](staging.fill(items, sizes))]
    one.outputs.check_batch(outputs, bucket.rows)
    names = [leaf.name for leaf in one.outputs.leaves]
    return [dict(zip(names, row, strict=True)) for row in staging.cut(one.outputs, outputs, sizes)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_P9_each_item_gets_its_answer_alone(programs, lengths, seed):
    items = items_of(lengths, seed)
    for item, answer in zip(items, run(programs, Bucket(AXES, (2, 16)), items), strict=True):
        expected = item["scale"] * (2 * item["x"] + np.arange(len(item["x"]))).sum()
        np.testing.assert_allclose(answer["sum"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(answer["each"], 2 * item["x"])


def test_P9_other_segments_do_not_matter(programs):
    items = items_of([3, 4, 5])
    before = run(programs, Bucket(AXES, (2, 16)), items)
    items[1]["x"] = np.full(4, 1e4, np.float32)
    after = run(programs, Bucket(AXES, (2, 16)), items)
    for place in (0, 2):
        for name in before[place]:
            np.testing.assert_array_equal(before[place][name], after[place][name])


def test_buffers_hold_nothing_of_the_batch_before(programs):
    bucket = Bucket(AXES, (2, 8))
    staging = programs[0].staging(bucket)
    run(programs, bucket, items_of([8, 4, 4]), staging)
    fresh = run(programs, bucket, items_of([2]))
    again = run(programs, bucket, items_of([2]), staging)
    np.testing.assert_array_equal(fresh[0]["sum"], again[0]["sum"])
    assert staging.arrays["segment_ids"].sum() == 2


def test_an_item_alone_is_laid_out_as_among_others(programs):
    one, _ = programs
    (item,) = items_of([5])
    staging = one.staging(Bucket(AXES, (2, 8)))
    staging.fill(items_of([8, 4, 4], seed=1), [(8,), (4,), (4,)])
    arrays = staging.fill([item], [(5,)])
    kept = np.arange(16).reshape(2, 8) < 5
    np.testing.assert_array_equal(arrays["segment_ids"], kept)
    np.testing.assert_array_equal(arrays["positions"], np.where(kept, np.arange(8), 0))
    np.testing.assert_array_equal(arrays["x"][kept], item["x"])
    assert not arrays["x"][~kept].any()
    assert arrays["scale"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_outputs_are_cut_after_a_fill_alone(programs):
    one, _ = programs
    staging = one.staging(Bucket(AXES, (2, 8)))
    with pytest.raises(OutputError, match="fill them first"):
        staging.cut(one.outputs, [], [(1,), (1,)])


def test_what_does_not_get_in_is_refused(programs):
    staging = programs[0].staging(Bucket(AXES, (1, 8)))
    items = items_of([5, 5])
    with pytest.raises(InputError, match="2 of 10 elements do not get into 1x8"):
        staging.fill(items, [(5,), (5,)])


def test_an_output_of_another_shape_is_refused_before_it_runs():
    def wrong(params, *, x, scale, segment_ids, positions):
        return {"sum": jnp.sum(x, axis=1), "each": x}

    one = PackedServable(base(), wrong, max_segments=SEGMENTS)
    with pytest.raises(OutputError, match=r"expected float32\[2, 4\]"):
        compile_program(one, Bucket(AXES, (2, 16)), one.place())


@pytest.mark.parametrize(
    ("options", "segments", "words"),
    [({}, 0, "at least 1 segment"), ({"sizes": "switched"}, 2, "one static program")],
)
def test_what_cannot_be_packed_is_refused(options, segments, words):
    with pytest.raises(SignatureError, match=words):
        PackedServable(base(**options), packed, max_segments=segments)


def test_an_axis_that_is_not_first_is_refused():
    one = Servable(lambda *, x: x, inputs={"x": "float32[3, length]"}, limits={"length": 8})
    with pytest.raises(SignatureError, match="first dim only"):
        PackedServable(one, packed)


def test_P9_a_model_that_keeps_segments_apart_passes_the_check(programs):
    one, made = programs
    leaves = one.padded.place()
    require_packed_safe(one, lambda bucket: compile_program(one.padded, bucket, leaves), made.__getitem__)


@pytest.mark.parametrize("words", ["gets alone", "neighbour"])
def test_P9_one_that_does_not_is_refused(words):
    def mixes(params, *, x, scale, segment_ids, positions):
        found = packed(params, x=x, scale=scale, segment_ids=segment_ids, positions=positions)
        # Far below the tolerance between buckets in the second case, so that only equality sees it.
        leak = (1.0 if words == "gets alone" else 1e-6) * jnp.mean(x, axis=1)[:, None]
        return {**found, "sum": found["sum"] + leak}

    one = PackedServable(base(), mixes, max_segments=SEGMENTS)
    leaves = one.place()
    with pytest.raises(UnsafePaddingError, match=words):
        require_packed_safe(
            one,
            lambda bucket: compile_program(one.padded, bucket, leaves),
            lambda bucket: compile_program(one, bucket, leaves),
        )


def test_the_weights_are_held_once():
    one = PackedServable(base(), packed, max_segments=SEGMENTS)
    placed = one.place()
    assert one.leaves is one.padded.leaves is placed
    assert one.outputs is one.outputs
    assert base(variants={"other": padded}).as_variant("other").leaves == []
