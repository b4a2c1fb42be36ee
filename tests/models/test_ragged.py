"""A batch without its padding: where tokens go, and encoders that answer for each text as for it alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import apart, bert, native, panels, turned
from servax.models.bert_weights import assemble
from servax.models.config import from_huggingface
from servax.models.native import self_attention
from servax.models.quantize_bert import quantize
from servax.models.ragged import Ragged, up_to_last

# Each shape is compiled.
SHAPES = [(0, 4), (3, 0), (1, 1), (1, 9), (2, 1), (5, 8)]
BATCH, LENGTH, SEGMENTS = 4, 10, 3
NAN = 39


@st.composite
def batches(draw):
    """The text of each place: anything, runs of texts before padding, nothing but padding, or no padding."""
    batch, length = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    texts = rng.integers(0, 4, (batch, length)).astype(np.int32)
    kind = draw(st.sampled_from(["any", "runs", "padding", "full"]))
    if kind == "runs":
        texts = np.sort(texts, axis=1)
        texts = np.where(texts == 3, 0, texts + 1) * (rng.random((batch, 1)) < 0.8)
    elif kind != "any":
        texts = np.full_like(texts, kind == "full")
    return texts.astype(np.int32)


@jax.jit
def there_and_back(texts):
    rows, numbers = Ragged.of(texts), jnp.arange(texts.size, dtype=jnp.int32).reshape(texts.shape)
    gathered = rows.gathered(numbers)
    return rows.texts, rows.starts, rows.live, gathered, rows.spread(gathered[..., None])[..., 0]


@settings(max_examples=60, deadline=None)
@given(batches())
def test_tokens_go_one_behind_another_and_come_back(texts):
    there, starts, live, gathered, back = (np.asarray(one) for one in there_and_back(texts))
    real, batch = texts != 0, len(texts)
    assert gathered.shape == (1, texts.size)
    assert back.shape == texts.shape
    assert live == starts[-1]
    if batch == 1:  # stays as it is
        assert starts.tolist() == [0, 1 + np.flatnonzero(real[0])[-1] if real.any() else 0]
        want = np.arange(live)
    else:
        assert starts.tolist() == [0, *np.cumsum(real.sum(1))]
        want = np.flatnonzero(real)
    np.testing.assert_array_equal(gathered[0, :live], want)
    np.testing.assert_array_equal(there[:live], texts.reshape(-1)[want])
    numbers = np.arange(texts.size).reshape(texts.shape)
    np.testing.assert_array_equal(back[real], numbers[real])
    assert np.isin(back[~real], numbers[~real]).all()
    assert np.isin(gathered[0, live:], numbers[~real]).all()


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3), (2, 3, 4)])
def test_places_up_to_the_last_real_one(shape):
    real, count = np.zeros(shape, bool), jax.jit(up_to_last)
    assert count(real) == 0
    for at in range(real.size):
        real.flat[at] = True
        assert count(real) == at + 1


@pytest.fixture(scope="module")
def wide(small_config, random_tensors):
    """An encoder whose heads the kernel takes, with a word that is not a number."""
    size = native.tile().lanes if self_attention.available() else 16
    raw = small_config | {"hidden_size": 2 * size, "num_attention_heads": 2, "num_hidden_layers": 2}
    assert self_attention.fits(size) == self_attention.available()

    @functools.cache
    def build(pooling="mean"):
        tensors = random_tensors(raw)
        tensors["embeddings.word_embeddings.weight"][NAN] = np.nan
        config = from_huggingface(raw, pooling=pooling)
        return raw, tensors, config, assemble(config, tensors)

    return build


def held(form, config, params):
    if form == "stacked":
        return params
    if form == "panels":
        return panels.panels(params, tables=False) if native.available() else pytest.skip("no kernel")
    if form == "int8":
        return quantize(config, params)
    return (turned.turned if form == "turned" else apart.apart)(params)


@functools.cache
def compiled(config):
    packed = functools.partial(bert.apply_packed, config, max_segments=SEGMENTS)
    return jax.jit(functools.partial(bert.apply, config)), jax.jit(packed)


def places(texts):
    """The place of each token in its text."""
    own = texts[:, :, None] == texts[:, None, :]
    return (np.tril(own).sum(2) - 1).astype(np.int32)


def drawn(texts, junk, seed=0):
    ids = np.random.default_rng(seed).integers(2, NAN, texts.shape)
    return np.where(texts > 0, ids, junk).astype(np.int32)


def all_texts(texts, ids, length=SEGMENTS):
    """The tokens of each text, by row and number."""
    return {
        (row, number): ids[row, texts[row] == number]
        for row in range(len(texts))
        for number in range(1, length + 1)
        if (texts[row] == number).any()
    }


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_P1_P9_texts_in_any_places_are_what_each_is_alone(pooling, wide, reference, data):
    """Padding stands anywhere; what it holds, and NaN among it, changes no bit."""
    (raw, tensors, config, params), rng = wide(pooling), np.random.default_rng(data.draw(st.integers(0, 999)))
    params = held("panels" if native.available() else "stacked", config, params)
    texts = rng.integers(0, 1 + SEGMENTS, (BATCH, LENGTH)).astype(np.int32)
    texts[: data.draw(st.integers(0, BATCH))] = 0
    for kind, run in zip(("dense", "packed"), compiled(config), strict=True):
        own = np.minimum(texts, 1) if kind == "dense" else texts
        answers = []
        for junk in (0, NAN, 10_000):
            if kind == "dense":
                found = run(params, ids=drawn(own, junk), mask=own > 0)["embedding"][:, None]
            else:
                inputs = {"segment_ids": own, "positions": np.where(own, places(own), junk).astype(np.int32)}
                found = run(params, ids=drawn(own, junk), **inputs)["embedding"]
            answers.append(np.asarray(found))
        for other in answers[1:]:
            np.testing.assert_array_equal(other, answers[0])
        want = np.zeros_like(answers[0])
        for (row, number), ids in all_texts(own, drawn(own, 0)).items():
            want[row, number - 1] = reference(raw, tensors, ids, pooling)
        np.testing.assert_allclose(answers[0], want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("form", ["stacked", "apart", "turned", "panels", "int8"])
def test_kernels_held_in_any_way_give_texts_in_a_batch_what_each_is_alone(form, wide):
    """Products without a kernel take part too, where attention has one."""
    _, _, config, params = wide()
    word = np.where(np.isnan(params["word"]), 1, params["word"])
    params, (dense, _) = held(form, config, {**params, "word": word}), compiled(config)
    mask = np.random.default_rng(3).random((BATCH, LENGTH)) < 0.6
    mask[2] = False
    ids = drawn(mask.astype(np.int32), NAN)
    whole = np.asarray(dense(params, ids=ids, mask=mask)["embedding"])
    for row in range(BATCH):
        single = np.zeros((BATCH, LENGTH), bool)
        single[3 - row, : mask[row].sum()] = True
        tokens = np.zeros_like(ids)
        tokens[single] = ids[row, mask[row]]
        alone = np.asarray(dense(params, ids=tokens, mask=single)["embedding"])
        np.testing.assert_allclose(whole[row], alone[3 - row], rtol=0, atol=2e-5)
        assert alone[3 - row].any() == (row != 2)


def test_P11_a_row_that_is_not_finite_spoils_neither_the_next_nor_an_empty_one(wide):
    _, _, config, params = wide()
    dense, packed = compiled(config)
    texts = np.zeros((BATCH, LENGTH), np.int32)
    texts[0], texts[2, 3:7], texts[2, 7:] = 1, 1, 2
    ids, positions = drawn(texts, 7), places(texts)
    spoilt = ids.copy()
    spoilt[0, 4] = NAN
    for kind in ("dense", "packed"):
        if kind == "dense":
            run = functools.partial(dense, params, mask=texts > 0)
        else:
            run = functools.partial(packed, params, segment_ids=texts, positions=positions)
        sound, got = (np.asarray(run(ids=some)["embedding"]) for some in (ids, spoilt))
        assert np.isnan(got[0]).any()
        assert np.isfinite(sound).all()
        np.testing.assert_array_equal(got[1:], sound[1:])


@pytest.mark.parametrize("shape", [("batch", "length"), ("batch", 8), (2, "length"), (1, "length")])
def test_shapes_may_be_symbols(wide, shape):
    _, _, config, params = wide()
    names = [one for one in shape if isinstance(one, str)]
    symbols = dict(zip(names, jax.export.symbolic_shape(", ".join(names)), strict=True))
    sizes = tuple(symbols.get(one, one) for one in shape)
    ids, mask = (jax.ShapeDtypeStruct(sizes, kind) for kind in (jnp.int32, jnp.bool_))
    hidden = config.hidden_size
    out = jax.eval_shape(functools.partial(bert.apply, config), params, ids=ids, mask=mask)
    assert out["embedding"].shape == (sizes[0], hidden)
    packed = functools.partial(bert.apply_packed, config, max_segments=SEGMENTS)
    out = jax.eval_shape(packed, params, ids=ids, segment_ids=ids, positions=ids)
    assert out["embedding"].shape == (sizes[0], SEGMENTS, hidden)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 0)])
def test_batches_of_nothing_give_nothing(wide, shape):
    _, _, config, params = wide()
    ids, mask = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool_)
    got = bert.apply(config, params, ids=ids, mask=mask)["embedding"]
    np.testing.assert_array_equal(got, np.zeros((shape[0], config.hidden_size), np.float32))
