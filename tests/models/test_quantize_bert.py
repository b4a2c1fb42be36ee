"""Encoders in int8 and bfloat16: what rounding may change, and what must stay as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Grid
from servax.jit_cache import Servable
from servax.jit_cache.safety import check_padding
from servax.models import bert, load, offset, quantize_bert, vnni
from servax.models.bert_weights import assemble
from servax.models.config import from_huggingface
from servax.models.native import integers
from servax.models.quantize import rounded

KINDS = {"int8": {"quantize": "int8"}, "bfloat16": {"dtype": "bfloat16"}}
# 1 - cosine to float32, mean and largest: over 1,000 texts of all lengths they are 5.5e-4 and 1.5e-3 in int8,
# 1.0e-5 and 2.1e-5 in bfloat16.
BOUNDS = {"int8": (8e-4, 2e-3), "bfloat16": (2e-5, 4e-5)}


def kernels(matrices, *, signed=False, factors=None):
    """`Offset` of float32 `(layers, in, out)`, and what it stands for."""
    found = [rounded(np.ascontiguousarray(one.T)) for one in matrices]
    values, scales = tuple(value for value, _ in found), np.stack([scale for _, scale in found])
    unsigned = not signed and vnni.available() and vnni.fits(*values[0].shape)
    lowest = np.array(0, np.uint8) if unsigned else np.array(-128, np.int8)
    sums = np.stack([value.sum(axis=1, dtype=np.int32) for value in values])
    stands_for = np.stack([(value * scale[:, None]).T for value, scale in found])
    return offset.Offset(values, scales, sums, lowest, factors), stands_for


def times(made, layer, x):
    return np.asarray(jax.jit(offset.product)(made, jnp.int32(layer), jnp.asarray(x)))


def drawn(rows, features, seed=0, *, low=-1.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 1, (rows, features)) + low * rng.normal(0, 1, (rows, 1))).astype(np.float32)


# Each shape is compiled.
@settings(max_examples=8, deadline=None)
@given(st.sampled_from([(1, 16, 8), (2, 8, 2), (5, 7, 3), (3, 40, 1)]), st.booleans(), st.integers(0, 99))
def test_a_product_is_off_by_half_a_step_of_each_activation_at_most(shape, signed, seed):
    rows, features, outputs = shape
    rng = np.random.default_rng(seed)
    matrices = rng.normal(0, 1, (2, features, outputs)).astype(np.float32)
    made, exact = kernels(matrices, signed=signed)
    x = drawn(rows, features, seed)
    step = (np.maximum(x.max(1), 0) - np.minimum(x.min(1), 0)) / 254
    # The value and the place of 0, half a step each.
    bound = 1.001 * step[:, None] * np.abs(exact[1]).sum(0)[None]
    assert (np.abs(times(made, 1, x) - x @ exact[1]) <= bound + 1e-5).all()


def test_uint8_and_int8_activations_give_the_same_bits():
    matrices = np.random.default_rng(0).normal(0, 1, (1, 64, 24)).astype(np.float32)
    x = drawn(9, 64).reshape(3, 3, 64)
    factors = np.linspace(0.5, 2, 64, dtype=np.float32)[None]
    either = [times(kernels(matrices, signed=signed, factors=factors)[0], 0, x) for signed in (False, True)]
    assert either[0].shape == (3, 3, 24)
    np.testing.assert_array_equal(*either)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_that_is_not_finite_stays_alone(bad):
    made, _ = kernels(np.random.default_rng(0).normal(0, 1, (1, 32, 16)).astype(np.float32))
    x = drawn(4, 32)
    clean = times(made, 0, x)
    x[2, 5] = bad
    got = times(made, 0, x)
    np.testing.assert_array_equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert bad == 3e38 or not np.isfinite(got[2]).any()


def test_the_ends_of_what_is_rounded_are_held():
    """A row's largest and smallest value where both lie half-way between two steps, and rows of one sign."""
    made, _ = kernels(np.eye(8, dtype=np.float32)[None])
    x = np.zeros((6, 8), np.float32)
    x[0, :2], x[1, :2], x[2, :2], x[3], x[4] = (101.5, -152.5), (0.5, -253.5), (127, -127), 5.0, -3.0
    np.testing.assert_allclose(times(made, 0, x), x, atol=1.01)
    np.testing.assert_allclose(times(made, 0, x)[2:], x[2:], rtol=1e-6)


@pytest.fixture
def small(random_tensors, small_config):
    tensors = random_tensors(small_config)
    config = from_huggingface(small_config, normalize=True)
    return config, assemble(config, tensors)


def embed(config, params, ids, mask):
    return np.asarray(jax.jit(functools.partial(bert.apply, config))(params, ids=ids, mask=mask)["embedding"])


def texts(rows=6, length=12, seed=0):
    rng = np.random.default_rng(seed)
    mask = np.arange(length)[None] < rng.integers(2, length + 1, (rows, 1))
    return rng.integers(0, 40, (rows, length)).astype(np.int32), mask


def test_a_random_encoder_points_nearly_where_it_did(small):
    config, params = small
    want, got = (embed(config, one, *texts()) for one in (params, quantize_bert.quantize(config, params)))
    assert (want * got).sum(1).min() > 0.999


def test_reach_is_what_the_encoder_computes(small):
    """The first product reads the embeddings of words that were drawn; a larger feature reaches further."""
    config, params = small
    before = quantize_bert.reach(config, params)
    assert {name: found.shape for name, found in before.items()} == dict.fromkeys(("qkv", "up"), (3, 16))
    params["layers"]["attention_norm"]["scale"][1, 3] *= 50
    after = quantize_bert.reach(config, params)
    np.testing.assert_array_equal(after["qkv"][:2], before["qkv"][:2])
    assert after["up"][1].argmax() == 3
    assert after["up"][1, 3] > 2 * np.delete(after["up"][1], 3).max()


def test_a_feature_far_larger_than_the_others_costs_little(small):
    config, params = small
    params["norm"]["scale"][5], params["layers"]["output_norm"]["scale"][:, 5] = 40, 40
    for name in ("qkv", "up"):
        params["layers"][name]["kernel"][:, 5] /= 20
    want, got = (embed(config, one, *texts()) for one in (params, quantize_bert.quantize(config, params)))
    assert (want * got).sum(1).min() > 0.999


def test_params_that_were_given_stay_as_they_were(small):
    config, params = small
    before = jax.tree.map(np.copy, params)
    quantize_bert.quantize(config, params)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_words_that_are_not_finite_spoil_nothing_else(small):
    config, params = small
    clean = quantize_bert.quantize(config, params)
    params["word"][39] = np.nan
    spoilt = quantize_bert.quantize(config, params)
    assert all(np.isfinite(one).all() for one in jax.tree.leaves(spoilt["layers"]))
    ids, mask = texts()
    np.testing.assert_allclose(
        embed(config, spoilt, np.minimum(ids, 38), mask),
        embed(config, clean, np.minimum(ids, 38), mask),
        atol=0.05,
    )


def test_without_the_instruction_numbers_are_the_same(small, monkeypatch):
    """In panels those of products are, see `test_panels_int8`, and what follows them may round otherwise."""
    config, params = small
    in_panels = quantize_bert.quantize(config, params)
    monkeypatch.setattr(integers, "available", lambda: False)
    here = quantize_bert.quantize(config, params)
    monkeypatch.setattr(vnni, "available", lambda: False)
    elsewhere = quantize_bert.quantize(config, params)
    assert {
        leaves["kernel"].lowest.dtype for leaves in elsewhere["layers"].values() if "kernel" in leaves
    } == {np.dtype(np.int8)}
    np.testing.assert_array_equal(embed(config, here, *texts()), embed(config, elsewhere, *texts()))
    np.testing.assert_allclose(embed(config, here, *texts()), embed(config, in_panels, *texts()), atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_shapes_give_symbolic_outputs(folder, kind):
    model = load(folder(), **KINDS[kind])
    batch, length = jax.export.symbolic_shape("batch, length")
    like = {"ids": jax.ShapeDtypeStruct((batch, length), jnp.int32)}
    like["mask"] = jax.ShapeDtypeStruct((batch, length), jnp.bool_)
    out = jax.eval_shape(model.apply, model.params, **like)
    assert out == {"embedding": jax.ShapeDtypeStruct((batch, 16), jnp.float32)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_weights_is_told_and_each_parameter_is_used(folder, kind):
    model = load(folder(), **KINDS[kind])
    assert model.config["weights"] == kind
    ids, mask = texts(2, 8)
    text = jax.jit(model.apply).lower(model.params, ids=ids, mask=mask).as_text()
    main = next(line for line in text.splitlines() if "@main(" in line)
    assert main.count("%arg") == len(jax.tree.leaves(model.params)) + 2
    assert load(folder()).config["weights"] == "float32"


def test_padding_is_safe(folder):
    model = load(folder(), quantize="int8")
    grid = Grid.parse("1x8 4x8 4x16", ("batch", "length"))
    served = Servable(
        model.apply, model.params, inputs=model.inputs, limits=grid.limits, grid=grid, name="small"
    )
    report = check_padding(served, ids_below={"ids": 40})
    assert report.ok, report.explain()


@pytest.fixture(scope="module", params=list(KINDS))
def golden_model(request):
    model = load("minilm", **KINDS[request.param])
    params = jax.device_put(model.params)
    segments = functools.partial(model.apply_packed, max_segments=4)
    return (
        request.param,
        jax.jit(functools.partial(model.apply, params)),
        jax.jit(functools.partial(segments, params)),
    )


def test_minilm_points_nearly_where_float64_does(golden_model, golden):
    kind, run, _ = golden_model
    ids, mask, want = of_at_most(golden, 32, 40)
    cosine = (np.asarray(run(ids=ids, mask=mask)["embedding"]) * want).sum(1)
    mean, most = BOUNDS[kind]
    assert len(want) == 40
    assert 1 - cosine.mean() < mean
    assert 1 - cosine.min() < most


def test_packed_minilm_equals_padded(golden_model, golden):
    """Sums over a longer row are of another order, and what is rounded then moves: see `safety_compare`."""
    kind, run, run_packed = golden_model
    ids, mask, _ = of_at_most(golden, 32, 16)
    alone = np.asarray(run(ids=ids, mask=mask)["embedding"])
    packed = {
        "ids": ids.reshape(4, 128),
        "segment_ids": np.where(mask.reshape(4, 128), 1 + np.arange(128) // 32, 0),
    }
    packed["positions"] = np.tile(np.arange(32), (4, 4))
    packed = {name: array.astype(np.int32) for name, array in packed.items()}
    got = np.asarray(run_packed(**packed)["embedding"]).reshape(16, -1)
    assert np.abs(got - alone).max() < {"int8": 1e-2, "bfloat16": 2e-3}[kind]
    assert 1 - (got * alone).sum(1).mean() < BOUNDS[kind][0] / 4


def of_at_most(golden, length, count):
    """Ids and mask of some texts, and their vectors."""
    found, vectors = golden
    chosen = [i for i, text in enumerate(found) if len(text["input_ids"]) <= length][:count]
    ids, mask = np.zeros((len(chosen), length), np.int32), np.zeros((len(chosen), length), bool)
    for row, i in enumerate(chosen):
        tokens = found[i]["input_ids"]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    return ids, mask, vectors[chosen]
