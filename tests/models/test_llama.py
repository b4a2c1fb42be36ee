"""The decoder, in whole sequences and in paged steps, against plain NumPy in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import BadPool, TooManyTokens, llama, pages
from servax.models.apart import apart
from servax.models.llama_config import LlamaConfig
from servax.models.random_model import random_params
from servax.models.rope import divisors
from servax.models.turned import turned

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "plain": {},
    "no_groups_free_head": {"num_kv_heads": 4, "tied": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tied": False},
    "one_kv_head_linear": {
        "num_kv_heads": 1,
        "rope_divisors": divisors({"type": "linear", "factor": 4.0}, 1e4, 8),
    },
    "llama3": {"rope_divisors": divisors(LLAMA3, 1e4, 8)},
    "no_kernel": {"kernel": False},
    "no_kernel_free_head": {"kernel": False, "tied": False, "qkv_bias": True},
}


def config_of(model):
    return model.step.args[0]


def drawn(model):
    """What a model was made of: layers stacked, kernels `(in, out)`."""
    return random_params(config_of(model), 0)


def reference(model, ids):
    """Logits of one sequence in float64, a head and a token at a time."""
    config: LlamaConfig = config_of(model)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), drawn(model))
    size, groups = config.head_size, config.num_heads // config.num_kv_heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    rates = np.array([config.rope_theta ** (-2 * i / size) for i in range(size // 2)])
    turns = (
        np.arange(len(ids))[:, None] * rates / (np.array(config.rope_divisors) if config.rope_divisors else 1)
    )

    def rotate(x):
        both = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * turns)
        return np.concatenate([both.real, both.imag], 1)

    x = p["word"][ids]
    for i in range(config.num_layers):
        w = jax.tree.map(lambda leaf: leaf[i], p["layers"])  # noqa: B023
        qkv = norm(x, w["input_norm"]["scale"]) @ w["qkv"]["kernel"] + w["qkv"].get("bias", 0)
        heads = np.split(qkv, config.num_heads + 2 * config.num_kv_heads, axis=1)
        q, rest = heads[: config.num_heads], heads[config.num_heads :]
        k, v = rest[: config.num_kv_heads], rest[config.num_kv_heads :]
        if config.qk_norm:
            q = [norm(head, w["q_norm"]["scale"]) for head in q]
            k = [norm(head, w["k_norm"]["scale"]) for head in k]
        q, k = [rotate(head) for head in q], [rotate(head) for head in k]
        mixed = []
        for h, head in enumerate(q):
            scores = head @ k[h // groups].T / math.sqrt(size)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[h // groups])
        x = x + np.concatenate(mixed, 1) @ w["attended"]["kernel"]
        gate, up = np.split(norm(x, w["output_norm"]["scale"]) @ w["gate_up"]["kernel"], 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]["kernel"]
    return norm(x, p["norm"]["scale"]) @ (p["word"] if config.tied else p["head"]).T


@pytest.fixture(scope="module")
def whole(llama_of):
    """Logits of a text by itself."""
    model = llama_of()
    forward = jax.jit(model.forward)

    @functools.cache
    def logits(ids):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        return forward(model.params, ids=padded, lengths=np.array([len(ids)], np.int32))[0]

    return logits


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 259, count).tolist()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_numpy_in_every_variant(variant, llama_of):
    model, ids = llama_of(**VARIANTS[variant]), np.array(tokens_of(50))
    junk = np.full((3, 53), 123_456, np.int32)
    junk[1, :50] = ids
    got = model.forward(model.params, ids=junk, lengths=np.array([0, 50, 3], np.int32))
    assert got.shape == (3, 53, 259)
    assert np.isfinite(got).all()
    close(got[1, :50], reference(model, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_single_tokens_equal_numpy(variant, pool_of):
    ids = tokens_of(29)
    pool = pool_of(VARIANTS[variant])
    want = reference(pool.model, np.array(ids))
    for begin, end in ((0, 7), (7, 8), (8, 16), (16, 21)):
        close(pool.append({"a": ids[begin:end]})["a"], want[end - 1])
    for i in range(21, 29):
        close(pool.append({"a": ids[i : i + 1]}, rows=1, chunk=1)["a"], want[i])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_cutting_in_any_company_gives_the_same_logits(data, pool_of, whole):
    """Lengths, cuts, page sizes and mates at random; every sequence as if it were alone."""
    pool = pool_of(
        page_size=data.draw(st.sampled_from([1, 3])),
        pages=200,
        width=40,
        seed=data.draw(st.integers(0, 9)),
    )
    texts = {
        name: tokens_of(data.draw(st.integers(1, 30)), name) for name in range(data.draw(st.integers(1, 3)))
    }
    want = {name: np.asarray(whole(tuple(text))) for name, text in texts.items()}
    done = dict.fromkeys(texts, 0)
    while left := [name for name in texts if done[name] < len(texts[name])]:
        turn = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        chunks = {name: texts[name][done[name] : done[name] + data.draw(st.integers(1, 8))] for name in turn}
        got = pool.append(chunks, junk=data.draw(st.integers(0, 99)))
        for name, chunk in chunks.items():
            done[name] += len(chunk)
            close(got[name], want[name][done[name] - 1])


def test_copied_pages_go_on_alike(pool_of):
    pool = pool_of()
    text = tokens_of(6)
    pool.append({"a": text})
    pool.tables["b"], pool.lengths["b"] = [pool.tables["a"][0], pool.free.pop()], 6
    source = np.array([pool.tables["a"][1], pages.NULL_PAGE], np.int32)
    target = np.array([pool.tables["b"][1], pages.SINK_PAGE], np.int32)
    pool.kv = jax.jit(pages.copy_pages, donate_argnums=0)(pool.kv, source=source, target=target)
    got = pool.append({"a": [7], "b": [9]})
    want = reference(pool.model, np.array([*text, 9]))
    close(got["b"], want[-1])
    assert not np.array_equal(got["a"], got["b"])


@pytest.mark.parametrize("form", [dict, apart, turned], ids=["stacked", "apart", "turned"])
def test_layers_in_other_forms_are_the_same_model(form, llama_of):
    model = llama_of()
    ids, lengths = np.array([tokens_of(6)], np.int32), np.array([6], np.int32)
    run = jax.jit(model.forward)
    trees = form(drawn(model)), model.params
    close(*(np.asarray(run(params, ids=ids, lengths=lengths)) for params in trees))


def test_a_half_precision_pool_is_close(pool_of):
    pool = pool_of(dtype=jnp.bfloat16)
    text = tokens_of(12)
    pool.append({"a": text[:8]})
    got = pool.append({"a": text[8:]})["a"]
    want = reference(pool.model, np.array(text))[-1]
    assert 1e-6 < np.abs(got - want).max() / np.abs(want).max() < 0.05
    assert pool.kv["k"].dtype == jnp.bfloat16


def test_parameters_have_the_declared_shapes(llama_of):
    config = dataclasses.replace(config_of(llama_of(**VARIANTS["qwen3"])), qkv_bias=True)
    shapes = jax.tree.map(lambda leaf: leaf.shape, llama.shapes(config))
    made = jax.eval_shape(lambda: llama.init(config))
    assert jax.tree.map(lambda leaf: leaf.shape, made) == shapes
    assert jax.tree.map(jnp.shape, random_params(config, 0)) == shapes
    assert shapes["layers"]["qkv"]["kernel"] == (2, 32, 64)


def test_a_pool_without_pages_and_a_text_beyond_the_limit_are_refused(llama_of):
    with pytest.raises(BadPool, match=r"more than 2 pages .* got 2 pages of 4"):
        llama_of().init_kv(pages=2, page_size=4)
    with pytest.raises(TooManyTokens, match="at most 512, the model's limit, got 513"):
        llama_of().forward(llama_of().params, ids=jnp.zeros((1, 513), jnp.int32), lengths=jnp.array([1]))
