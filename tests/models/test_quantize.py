"""Decoders in int8: what rounding may change, what turning may not, and how well SmolLM2 still writes."""

import dataclasses
import gzip
import importlib.resources
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import UnsupportedModel, generative, llama, load, quantized, tiny
from servax.models.quantize import block_of, hadamard, orthogonal, quantize, rounded, turned
from servax.models.quantized import Quantized
from servax.models.random_model import random_params

VARIANTS = {
    "plain": {},
    "head": {"num_kv_heads": 4, "tied": False},
    "qwen2": {"qkv_bias": True, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True},
}
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40))


@given(SHAPES, st.integers(0, 99), st.floats(-12, 12))
def test_rounding_is_off_by_half_a_step_at_most(shape, seed, exponent):
    rows = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(10**exponent)
    rows[0] *= seed % 2  # sometimes a row of zeros
    values, scales = rounded(rows)
    assert values.dtype == np.int8
    assert np.abs(values.astype(int)).max() <= 127
    assert (np.abs(values * scales[:, None] - rows) <= scales[:, None] * 0.5001).all()


@settings(max_examples=4, deadline=None)  # each shape is compiled
@given(SHAPES, st.integers(1, 20), st.integers(0, 99))
def test_products_are_those_of_the_rounded_numbers_and_of_no_other_row(shape, count, seed):
    rng = np.random.default_rng(seed)
    table = Quantized(*rounded(rng.standard_normal(shape, np.float32)))
    x = rng.standard_normal((count, shape[1]), np.float32)
    scores = jax.jit(quantized.scores)
    got = np.asarray(scores(table, x))
    values, scales = rounded(x)
    exact = values.astype(np.int64) @ table.values.T.astype(np.int64)
    np.testing.assert_allclose(got, exact * scales[:, None] * table.scales, rtol=1e-5, atol=1e-30)
    x[1:] = np.nan
    alone = np.asarray(scores(table, x))
    np.testing.assert_array_equal(alone[0], got[0])
    assert np.isnan(alone[1:]).all()
    np.testing.assert_array_equal(scores(table, x[:1])[0], got[0])


@given(st.integers(1, 4096))
def test_turns_are_orthogonal_and_fit(size):
    block = block_of(size)
    assert size % block == 0
    np.testing.assert_allclose(hadamard(block) @ hadamard(block).T, np.eye(block), atol=1e-6)
    few = size % 70 + 1
    np.testing.assert_allclose(orthogonal(few) @ orthogonal(few).T, np.eye(few), atol=1e-5)


def texts_of(model, count=3, length=20):
    ids = np.random.default_rng(1).integers(3, model.vocab_size, (count, length), np.int32)
    return {"ids": ids, "lengths": np.array([length, 7, 1], np.int32)[:count]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_turning_changes_no_answer(variant):
    model = tiny(**VARIANTS[variant])
    config = model.step.args[0]
    params = random_params(config, 0)
    loose = dataclasses.replace(config, tied=False)
    want, got = (
        jax.jit(lambda params, config=config: llama.forward(config, params, **texts_of(model)))(params)
        for config, params in ((config, params), (loose, turned(config, params)))
    )
    np.testing.assert_allclose(got, want, atol=1e-3 * float(np.abs(want).max()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_is_near_float32_and_takes_a_fraction(variant):
    model, small = tiny(**VARIANTS[variant]), tiny(int8=True, **VARIANTS[variant])
    want, got = (np.asarray(jax.jit(one.forward)(one.params, **texts_of(one))) for one in (model, small))
    assert 0 < np.std(got - want) < 0.1 * np.std(want)
    matrices = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(small.params) if leaf.size > 10_000}
    assert matrices <= {np.dtype(np.int8)}
    assert (model.config["weights"], small.config["weights"]) == ("float32", "int8")


def test_int8_step_over_pages_equals_whole_sequences():
    model = tiny(int8=True)
    ids = texts_of(model)["ids"][:1]
    want = np.asarray(jax.jit(model.forward)(model.params, ids=ids, lengths=np.array([20], np.int32)))[0]
    kv, table = model.init_kv(pages=6, page_size=8), np.array([[2, 3, 4]], np.int32)
    step = jax.jit(model.step)
    for begin, end in ((0, 16), *((at, at + 1) for at in range(16, 20))):
        sizes = {
            "context_lengths": np.array([begin], np.int32),
            "chunk_lengths": np.array([end - begin], np.int32),
        }
        logits, kv = step(model.params, kv, ids=ids[:, begin:end], page_table=table, **sizes)
        np.testing.assert_allclose(logits[0], want[end - 1], atol=0.05 * float(np.std(want)))


def test_params_that_were_given_stay_as_they_were():
    config = tiny().step.args[0]
    params = random_params(config, 0)
    before = jax.tree.map(np.copy, params)
    quantize(config, params)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_only_decoders_and_only_int8():
    with pytest.raises(UnsupportedModel, match="quantize must be int8 or left out, got 'int4'"):
        load("smollm2", quantize="int4")
    with pytest.raises(UnsupportedModel, match="for models that generate text, got int8 for 'minilm'"):
        load("minilm", quantize="int8")


@pytest.fixture(scope="module")
def smollm2():
    """The model, and the same in int8, on the device."""
    model = load("smollm2")
    config = model.step.args[0]
    stacked = {
        name: {key: np.stack(leaf) if isinstance(leaf, tuple) else leaf for key, leaf in leaves.items()}
        for name, leaves in model.params["layers"].items()
    }
    small = generative.make("int8", config, {**model.params, "layers": stacked}, model.tokenizer, int8=True)
    return [(jax.jit(one.forward), jax.device_put(one.params)) for one in (model, small)], model.tokenizer


def wikipedia(tokenizer, count, length):
    """Token ids of paragraphs one after another, `(count, length)`."""
    packed = importlib.resources.files("servax.experiments") / "data" / "texts.jsonl.gz"
    lines = map(json.loads, gzip.decompress(packed.read_bytes()).splitlines())
    paragraphs = [line["text"] + "\n" for line in lines if line["source"].startswith("wikitext")]
    ids = np.concatenate(tokenizer.encode_rendered(paragraphs[:100]))
    return ids[: count * length].reshape(count, length).astype(np.int32)


def test_perplexity_of_smollm2_is_within_a_percent(smollm2):
    models, tokenizer = smollm2
    ids = wikipedia(tokenizer, 12, 256)

    def surprise(forward, params, ids):
        logits = forward(params, ids=ids, lengths=np.full(len(ids), ids.shape[1], np.int32))[:, :-1]
        own = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)

    of_batch = jax.jit(surprise, static_argnums=0)
    exact, rounded = (np.exp(np.mean([of_batch(*one, some) for some in np.split(ids, 3)])) for one in models)
    assert 15 < exact < 30
    assert abs(rounded / exact - 1) < 0.01


def test_int8_smollm2_prefers_what_the_reference_prefers_clearly(smollm2):
    (_, (forward, params)), _ = smollm2
    path = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
    texts = [one for one in json.loads(path.read_text(encoding="utf-8")) if len(one["prompt_ids"]) <= 10]
    ids = np.zeros((len(texts), 64), np.int32)
    for row, text in enumerate(texts):
        joined = text["prompt_ids"] + text["tokens"]
        ids[row, : len(joined)] = joined
    best = np.asarray(jnp.argmax(forward(params, ids=ids, lengths=np.full(len(texts), 64, np.int32)), axis=2))
    clear = [
        best[row, len(text["prompt_ids"]) - 1 + i] == token
        for row, text in enumerate(texts)
        for i, (token, gap) in enumerate(zip(text["tokens"], text["top2_gap"], strict=True))
        if gap > 0.5
    ]
    assert len(clear) > 250
    assert np.mean(clear) > 0.99
