"""The encoder against plain NumPy, under padding, packing and symbolic shapes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from servax.models import TooManyTokens, UnsupportedModel, bert, bert_encoder, load
from servax.models.bert_weights import assemble
from servax.models.config import BertConfig, from_huggingface
from servax.models.pooling import unit_norm

TOKENS = [[2, 5, 6, 3], [2, 3], [2, 9, 8, 7, 6, 5, 4, 3], [2, 11, 3]]


def padded(rows, batch, length, fill=0):
    ids, mask = np.full((batch, length), fill, np.int32), np.zeros((batch, length), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, True
    return ids, mask


@pytest.fixture
def small(random_tensors, small_config):
    def build(**changes):
        from_raw = {k: v for k, v in changes.items() if k in ("pooling", "normalize")}
        raw = small_config | {k: v for k, v in changes.items() if k not in from_raw}
        tensors = random_tensors(raw)
        config = from_huggingface(raw, **from_raw)
        return raw, tensors, config, assemble(config, tensors)

    return build


@pytest.mark.parametrize(
    ("activation", "pooling", "normalize"),
    [
        ("gelu", "mean", True),
        ("gelu_new", "cls", False),
        ("relu", "max", False),
        ("silu", "mean_sqrt_len", False),
        ("quick_gelu", "cls", True),
        ("tanh", "max", True),
    ],
)
def test_equals_numpy_for_each_activation_and_pooling(small, reference, activation, pooling, normalize):
    raw, tensors, config, params = small(hidden_act=activation, pooling=pooling, normalize=normalize)
    ids, mask = padded(TOKENS, 5, 10, fill=10_000)
    got = np.asarray(jax.jit(functools.partial(bert.apply, config))(params, ids=ids, mask=mask)["embedding"])
    want = [reference(raw, tensors, row, pooling, normalize) for row in TOKENS]
    np.testing.assert_allclose(got[:4], want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))
    np.testing.assert_array_equal(got[4], np.zeros(16))


def test_roberta_numbers_positions_after_the_padding_id(small, reference):
    raw, tensors, config, params = small(model_type="roberta", pad_token_id=1, type_vocab_size=1)
    assert (config.position_offset, config.max_tokens) == (2, 18)
    ids, mask = padded(TOKENS, 4, 18, fill=1)
    got = bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))["embedding"]
    want = [reference(raw, tensors, row, offset=2) for row in TOKENS]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_P4_left_padding_equals_alone(small, reference, pooling):
    raw, tensors, config, params = small(pooling=pooling)
    ids, mask = np.full((4, 16), 7, np.int32), np.zeros((4, 16), bool)
    for i, row in enumerate(TOKENS):
        ids[i, 16 - len(row) :], mask[i, 16 - len(row) :] = row, True
    got = bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))["embedding"]
    np.testing.assert_allclose(got, [reference(raw, tensors, row, pooling) for row in TOKENS], atol=2e-5)


@pytest.mark.parametrize("junk", [39, 10_000, -5])
def test_P11_a_table_row_of_nan_cannot_leak_from_padding(small, junk):
    _, _, config, params = small()
    params["word"][39] = np.nan
    ids, mask = padded(TOKENS, 5, 10, fill=junk)
    got = bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))["embedding"]
    assert np.isfinite(got).all()


def test_ids_outside_the_table_stay_with_their_row(small, reference):
    raw, tensors, config, params = small()
    ids, mask = padded([[2, 10_000, 3], TOKENS[0], [2, -7, 3]], 3, 6)
    got = bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))["embedding"]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1], reference(raw, tensors, TOKENS[0]), atol=2e-5)


def packed_row(rows, length):
    ids, segments, positions = (np.full(length, fill, np.int32) for fill in (9_999, 0, 77))
    at = 0
    for number, row in enumerate(rows, 1):
        part = slice(at, at + len(row))
        ids[part], segments[part], positions[part] = row, number, np.arange(len(row))
        at = part.stop
    return ids, segments, positions


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len"])
def test_P9_packed_segments_equal_alone_and_do_not_see_each_other(small, reference, pooling):
    raw, tensors, config, params = small(pooling=pooling, normalize=True)
    packed = jax.jit(functools.partial(bert.apply_packed, config, max_segments=5))

    def run(rows):
        ids, segments, positions = (np.stack([a, b]) for a, b in zip(*map(packed_one, rows), strict=True))
        return np.asarray(packed(params, ids=ids, segment_ids=segments, positions=positions)["embedding"])

    packed_one = functools.partial(packed_row, length=20)
    got = run([TOKENS, []])
    assert got.shape == (2, 5, 16)
    want = [reference(raw, tensors, row, pooling, True) for row in TOKENS]
    np.testing.assert_allclose(got[0, :4], want, atol=1e-5)
    assert not got[0, 4].any()
    assert not got[1].any()
    other = run([[TOKENS[0], [13, 12], *TOKENS[2:]], TOKENS])
    np.testing.assert_array_equal(other[0, [0, 2, 3]], got[0, [0, 2, 3]])
    assert np.abs(other[0, 1] - got[0, 1]).max() > 1e-3


def test_symbolic_shapes_give_symbolic_outputs(small):
    _, _, config, params = small()
    batch, length = jax.export.symbolic_shape("batch, length")
    like = {"ids": jax.ShapeDtypeStruct((batch, length), jnp.int32)}
    like["mask"] = jax.ShapeDtypeStruct((batch, length), jnp.bool_)
    out = jax.eval_shape(functools.partial(bert.apply, config), params, **like)
    assert out == {"embedding": jax.ShapeDtypeStruct((batch, 16), jnp.float32)}
    like = dict.fromkeys(("ids", "segment_ids", "positions"), like["ids"])
    out = jax.eval_shape(functools.partial(bert.apply_packed, config, max_segments=3), params, **like)
    assert out == {"embedding": jax.ShapeDtypeStruct((batch, 3, 16), jnp.float32)}


def test_the_program_uses_every_parameter(small):
    _, _, config, params = small()
    ids, mask = padded(TOKENS, 4, 8)
    text = jax.jit(functools.partial(bert.apply, config)).lower(params, ids=ids, mask=mask).as_text()
    main = next(line for line in text.splitlines() if "@main(" in line)
    assert len(re.findall(r"%arg\d+:", main)) == len(jax.tree.leaves(params)) + 2


def test_the_encoder_is_a_module_of_params(small):
    _, _, config, params = small()
    model = bert_encoder.BertEncoder(config, rngs=nnx.Rngs(0))
    _, state, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    pure = nnx.to_pure_dict(state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), pure) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )
    assert jax.tree.structure(bert.init(config)) == jax.tree.structure(bert.shapes(config))
    ids = jnp.ones((2, 3), jnp.int32)
    assert model(ids, ids, bert_encoder.Reach.of(ids, jnp.ones((2, 1, 1, 3), bool))).shape == (2, 3, 16)


def test_V3_a_length_beyond_the_positions_is_refused(small):
    _, _, config, params = small()
    ids, mask = padded(TOKENS, 4, 20)
    assert bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))
    ids, mask = padded(TOKENS, 4, 21)
    with pytest.raises(TooManyTokens, match=r"at most 20.*got 21"):
        bert.apply(config, params, ids=jnp.asarray(ids), mask=jnp.asarray(mask))


def test_the_slope_of_the_unit_norm_is_finite_on_a_row_of_zeros():
    slope = jax.grad(lambda x: unit_norm(x)[1, 0])(jnp.asarray([[0.0, 0.0], [3.0, 4.0]]))
    np.testing.assert_allclose(slope, [[0.0, 0.0], [16 / 125, -12 / 125]], atol=1e-7)


def test_P10_the_unit_norm_of_zeros_is_zeros():
    got = unit_norm(jnp.asarray([[0.0, 0.0], [3.0, 4.0]]))
    np.testing.assert_allclose(got, [[0, 0], [0.6, 0.8]], atol=1e-7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, "model_type must be one of bert.*got 't5'"),
        ({"position_embedding_type": "relative_key"}, "'absolute', got 'relative_key'"),
        ({"hidden_size": 15}, "4 heads for width 15"),
        ({"pad_token_id": 40}, r"0\.\.39\), got 40"),
        ({"pooling": "weighted"}, "pooling must be one of mean.*got 'weighted'"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(small_config, change, words):
    pooling = change.get("pooling", "mean")
    with pytest.raises(UnsupportedModel, match=words):
        from_huggingface(small_config | change, pooling=pooling)


def test_an_unknown_activation_is_refused_before_the_weights_are_read(folder, small_config):
    with pytest.raises(UnsupportedModel, match=r"activation must be one of gelu, .*got 'mish'"):
        load(folder(small_config | {"hidden_act": "mish"}))


def test_configurations_compare_by_value():
    one = BertConfig(40, 16, 3, 4, 24)
    assert hash(one) == hash(BertConfig(40, 16, 3, 4, 24))
    assert one != BertConfig(40, 16, 3, 4, 24, pooling="cls")
