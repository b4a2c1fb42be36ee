"""The decoder against plain NumPy in float64, and the paged step against whole sequences, bit by bit."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.models import BadPool, TooManyTokens, llama, paged, tiny
from servax.models.llama_config import LlamaConfig
from servax.models.random_model import random_params
from servax.models.rope import divisors

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
}


@functools.cache
def model_of(variant="plain"):
    return tiny(**VARIANTS[variant])


@functools.cache
def compiled(variant="plain"):
    return jax.jit(model_of(variant).step)


def config_of(model):
    return model.step.args[0]


def reference(config: LlamaConfig, params, ids):
    """Logits of one sequence in float64, a head and a token at a time."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    size, groups = config.head_size, config.num_heads // config.num_kv_heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    rates = np.array([config.rope_theta ** (-2 * i / size) for i in range(size // 2)])
    turns = (
        np.arange(len(ids))[:, None] * rates / (np.array(config.rope_divisors) if config.rope_divisors else 1)
    )

    def rotate(x):
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * turns)
        return np.concatenate([turned.real, turned.imag], 1)

    x = p["word"][ids]
    for i in range(config.num_layers):
        w = {name: {key: leaf[i] for key, leaf in leaves.items()} for name, leaves in p["layers"].items()}
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


class Pool:
    """A pool full of NaN, and sequences that own shuffled pages of it."""

    def __init__(self, variant="plain", *, page_size=4, pages=40, width=8, seed=0, dtype=jnp.float32):
        self.model, self.step = model_of(variant), compiled(variant)
        self.page_size, self.width = page_size, width
        spec = self.model.kv_shapes(pages=pages, page_size=page_size, dtype=dtype)
        self.kv = {name: jnp.full(part.shape, jnp.nan, part.dtype) for name, part in spec.items()}
        self.free = list(np.random.default_rng(seed).permutation(np.arange(2, pages)))
        self.tables, self.lengths = {}, {}

    def append(self, chunks, *, rows=4, chunk=8, junk=0):
        """Append `chunks[name]` to each named sequence in one step; logits by name."""
        ids = np.random.default_rng(junk).integers(-5, 10_000, (rows, chunk)).astype(np.int32)
        table = np.zeros((rows, self.width), np.int32)
        context, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (name, tokens) in enumerate(chunks.items()):
            pages = self.tables.setdefault(name, [])
            context[row], lengths[row] = self.lengths.get(name, 0), len(tokens)
            self.lengths[name] = int(context[row]) + len(tokens)
            while len(pages) * self.page_size < self.lengths[name]:
                pages.append(self.free.pop())
            ids[row, : len(tokens)], table[row, : len(pages)] = tokens, pages
        logits, self.kv = self.step(
            self.model.params,
            self.kv,
            ids=ids,
            page_table=table,
            context_lengths=context,
            chunk_lengths=lengths,
        )
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        return dict(zip(chunks, logits, strict=False))


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 259, count).tolist()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_numpy_in_every_variant(variant):
    model, ids = model_of(variant), np.array(tokens_of(50))
    junk = np.full((3, 53), 123_456, np.int32)
    junk[1, :50] = ids
    got = model.forward(model.params, ids=junk, lengths=np.array([0, 50, 3], np.int32))
    assert got.shape == (3, 53, 259)
    assert np.isfinite(got).all()
    close(got[1, :50], reference(config_of(model), model.params, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_single_tokens_equal_numpy(variant):
    ids = tokens_of(29)
    pool = Pool(variant)
    want = reference(config_of(pool.model), pool.model.params, np.array(ids))
    for begin, end in ((0, 7), (7, 8), (8, 16), (16, 21)):
        close(pool.append({"a": ids[begin:end]})["a"], want[end - 1])
    for i in range(21, 29):
        close(pool.append({"a": ids[i : i + 1]}, rows=1, chunk=1)["a"], want[i])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_cutting_in_any_company_gives_the_same_logits(data):
    """Lengths, cuts, page sizes and mates at random; every sequence as if it were alone."""
    pool = Pool(
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


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_mixed_steps_give_what_chunks_of_their_own_give(data):
    """Rows with one token and rows with a chunk, in any order; one of those with more tokens has a past."""
    rows, beside, reader = 10, 12, data.draw(st.integers(0, 9))
    pool = Pool(page_size=3, pages=120, width=8, seed=data.draw(st.integers(0, 9)))
    lengths = [data.draw(st.integers(0, 4)) for _ in range(rows)]
    held = [
        data.draw(st.integers(0, 9)) if length == 1 or row == reader else 0
        for row, length in enumerate(lengths)
    ]
    texts = {row: tokens_of(held[row] + lengths[row], row) for row in range(rows) if lengths[row]}
    pool.append({row: text[: held[row]] for row, text in texts.items()}, rows=rows, chunk=9)
    kv = pool.kv
    chunks = {row: text[held[row] :] for row, text in texts.items()}
    want = pool.append(chunks, rows=rows, chunk=4)
    further = [(token, row, at) for row, chunk in chunks.items() for at, token in enumerate(chunk[:-1])]
    further = (further + [(7, -1, 2)] * beside)[:beside]
    chunks = {
        row: chunk for row, chunk in chunks.items() if sum(one[1] == row for one in further) + 1 == len(chunk)
    }
    ids, table = np.zeros(rows, np.int32), np.zeros((rows, 8), np.int32)
    for row, chunk in chunks.items():
        ids[row], table[row, : len(pool.tables[row])] = chunk[-1], pool.tables[row]
    got, after = mixed()(
        pool.model.params,
        kv,
        ids=ids,
        further_ids=np.array(further, np.int32)[:, 0],
        further=np.array([one if one[1] in chunks else (7, -1, 2) for one in further], np.int32).T[1:],
        reads=np.int32(reader),
        page_table=table,
        context_lengths=np.array([held[row] if row in chunks else 0 for row in range(rows)], np.int32),
        chunk_lengths=np.array([len(chunks.get(row, ())) for row in range(rows)], np.int32),
    )
    assert np.isfinite(got).all()
    for row in chunks:
        close(np.asarray(got[row]), want[row])
        for name, part in after.items():
            own = np.array(pool.tables[row])
            np.testing.assert_allclose(part[:, own], pool.kv[name][:, own], rtol=0, atol=1e-4)


def test_G12_what_is_not_finite_stays_in_its_row_of_a_mixed_step():
    """Row 1 has it in its past or reads it now, beside a row that decodes and a prompt that begins."""
    model = model_of("no_groups_free_head")
    poison = 77
    word = np.array(model.params["word"])
    word[poison] = np.nan
    params = {**model.params, "word": word}
    step, mix = jax.jit(model.step), jax.jit(model.mixed_step)

    def run(past, now):
        spec = model.kv_shapes(pages=12, page_size=4)
        kv = {name: jnp.full(part.shape, jnp.nan, part.dtype) for name, part in spec.items()}
        table = np.array([[2, 3], [4, 5], [6, 7]], np.int32)
        lengths = {"context_lengths": np.zeros(3, np.int32), "chunk_lengths": np.array([3, 2, 0], np.int32)}
        ids = np.array([[5, 6, 7], [8, past, 0], [0, 0, 0]], np.int32)
        _, kv = step(params, kv, ids=ids, page_table=table, **lengths)
        logits, kv = mix(
            params,
            kv,
            ids=np.array([9, 10, 11], np.int32),
            further_ids=np.array([now, 12, 13, 14], np.int32),
            further=np.array([[1, 1, 2, -1], [0, 1, 0, 0]], np.int32),
            reads=np.int32(1),
            page_table=table,
            context_lengths=np.array([3, 2, 0], np.int32),
            chunk_lengths=np.array([1, 3, 2], np.int32),
        )
        return np.asarray(logits), kv

    want, pool = run(21, 22)
    assert np.isfinite(want).all()
    for past, now in ((poison, 22), (21, poison)):
        got, after = run(past, now)
        assert np.isnan(got[1]).any()
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
        for name, part in after.items():
            np.testing.assert_array_equal(part[:, [2, 3, 6, 7]], pool[name][:, [2, 3, 6, 7]])


@functools.cache
def mixed():
    return jax.jit(model_of().mixed_step)


@functools.cache
def jitted_forward():
    return jax.jit(model_of().forward)


@functools.cache
def whole(ids):
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(ids)] = ids
    model = model_of()
    return jitted_forward()(model.params, ids=padded, lengths=np.array([len(ids)], np.int32))[0]


def test_P11_G7_neighbours_junk_and_page_places_change_no_bit():
    """In one bucket, bitwise: other mates, junk ids, pages, a wider table, more context beside."""
    text = tokens_of(11)

    def run(mates, width, seed):
        pool = Pool(width=width, seed=seed)
        pool.append({"a": text[:6]} | mates, junk=seed)
        longer = {name: tokens_of(1, seed) for name in mates}
        return pool.append({"a": text[6:]} | longer, junk=seed + 1)["a"]

    alone = run({}, 8, 0)
    np.testing.assert_array_equal(alone, run({"b": tokens_of(8, 1)}, 8, 3))
    np.testing.assert_array_equal(alone, run({"b": tokens_of(3, 2), "c": tokens_of(8, 3)}, 30, 5))


def test_G7_padding_writes_to_the_sink_and_to_nothing_else():
    pool = Pool()
    pool.append({"a": tokens_of(5)})
    written = {name: np.isfinite(np.asarray(part)) for name, part in pool.kv.items()}
    used = np.zeros((40, 4), bool)
    used[pool.tables["a"][0]], used[pool.tables["a"][1], :1] = True, True
    for name, axis in (("k", 4), ("v", 3)):
        others = tuple(i for i in range(5) if i not in (1, axis))
        assert (written[name].all(others) == written[name].any(others)).all()
        places = written[name].all(others)
        assert places[paged.SINK_PAGE].any()
        assert not places[paged.NULL_PAGE].any()
        np.testing.assert_array_equal(places[2:], used[2:])


def test_a_position_without_a_table_entry_goes_to_the_sink():
    pool = Pool()
    pool.width = 1
    pool.append({"a": tokens_of(4)})
    before = {name: np.asarray(part)[:, 2:] for name, part in pool.kv.items()}
    page = pool.tables["a"][0]
    pool.step(
        pool.model.params,
        pool.kv,
        ids=np.zeros((1, 1), np.int32),
        page_table=np.array([[page]], np.int32),
        context_lengths=np.array([4], np.int32),
        chunk_lengths=np.array([1], np.int32),
    )
    for name, part in pool.kv.items():
        np.testing.assert_array_equal(np.asarray(part)[:, 2:], before[name])


def test_G10_the_pool_is_updated_in_place():
    """Donated bytes all come back, and what the program needs beside them does not grow with the pool."""
    model = model_of()
    facts = []
    for pages in (100, 400):
        kv = model.kv_shapes(pages=pages, page_size=16)
        arguments = {
            "ids": jax.ShapeDtypeStruct((4, 1), jnp.int32),
            "page_table": jax.ShapeDtypeStruct((4, 8), jnp.int32),
            "context_lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
            "chunk_lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
        }
        step = jax.jit(model.step, donate_argnums=1).lower(model.params, kv, **arguments).compile()
        memory = step.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(math.prod(part.shape) * 4 for part in kv.values())
        facts.append(memory.temp_size_in_bytes)
    assert facts[0] == facts[1]


def test_copied_pages_go_on_alike():
    pool = Pool()
    text = tokens_of(6)
    pool.append({"a": text})
    pool.tables["b"], pool.lengths["b"] = [pool.tables["a"][0], pool.free.pop()], 6
    source = np.array([pool.tables["a"][1], paged.NULL_PAGE], np.int32)
    target = np.array([pool.tables["b"][1], paged.SINK_PAGE], np.int32)
    pool.kv = jax.jit(paged.copy_pages, donate_argnums=0)(pool.kv, source=source, target=target)
    got = pool.append({"a": [7], "b": [9]})
    want = reference(config_of(pool.model), pool.model.params, np.array([*text, 9]))
    close(got["b"], want[-1])
    assert not np.array_equal(got["a"], got["b"])


def test_a_donated_pool_is_written_in_place():
    model, rows, i32 = model_of(), 2, jnp.int32
    pool = model.kv_shapes(pages=400, page_size=16)
    inputs = {"ids": (rows, 1), "page_table": (rows, 8), "context_lengths": (rows,), "chunk_lengths": (rows,)}
    shapes = {name: jax.ShapeDtypeStruct(shape, i32) for name, shape in inputs.items()}
    memory = jax.jit(model.step, donate_argnums=1).lower(model.params, pool, **shapes).compile()
    memory = memory.memory_analysis()
    held = sum(part.size * 4 for part in pool.values())
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4


def test_stacked_layers_are_the_same_model():
    model = model_of()
    layers = {
        name: {key: np.stack(leaf) for key, leaf in leaves.items()}
        for name, leaves in model.params["layers"].items()
    }
    stacked = {**model.params, "layers": layers}
    ids, lengths = np.array([tokens_of(6)], np.int32), np.array([6], np.int32)
    run = jax.jit(model.forward)
    close(*(np.asarray(run(params, ids=ids, lengths=lengths)) for params in (stacked, model.params)))


def test_a_half_precision_pool_is_close():
    pool = Pool(dtype=jnp.bfloat16)
    text = tokens_of(12)
    pool.append({"a": text[:8]})
    got = pool.append({"a": text[8:]})["a"]
    want = reference(config_of(pool.model), pool.model.params, np.array(text))[-1]
    assert 1e-6 < np.abs(got - want).max() / np.abs(want).max() < 0.05
    assert pool.kv["k"].dtype == jnp.bfloat16


def test_parameters_have_the_declared_shapes():
    config = dataclasses.replace(config_of(model_of("qwen3")), qkv_bias=True)
    shapes = jax.tree.map(lambda leaf: leaf.shape, llama.shapes(config))
    drawn = jax.eval_shape(lambda: llama.init(config))
    assert jax.tree.map(lambda leaf: leaf.shape, drawn) == shapes
    assert jax.tree.map(jnp.shape, random_params(config, 0)) == shapes
    assert shapes["layers"]["qkv"]["kernel"] == (2, 32, 64)


def test_a_pool_without_pages_and_a_text_beyond_the_limit_are_refused():
    with pytest.raises(BadPool, match=r"more than 2 pages .* got 2 pages of 4"):
        model_of().init_kv(pages=2, page_size=4)
    with pytest.raises(TooManyTokens, match="at most 512, the model's limit, got 513"):
        model_of().forward(model_of().params, ids=jnp.zeros((1, 513), jnp.int32), lengths=jnp.array([1]))
