"""The default model against outputs made once with PyTorch in float64."""

import functools

import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def embed(minilm):
    params = jax.device_put(minilm.params)
    compiled = jax.jit(functools.partial(minilm.apply, params))
    return lambda ids, mask: np.asarray(compiled(ids=ids, mask=mask)["embedding"])


def test_tokenizer_gives_the_reference_ids(minilm, golden):
    texts, _ = golden
    rows = minilm.tokenizer.encode([text["text"] for text in texts])
    assert [minilm.tokenizer.truncate(row).tolist() for row in rows] == [text["input_ids"] for text in texts]


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (4, 31), (16, 64), (5, 256)])
def test_P3_golden_in_every_shape_beside_junk(embed, golden, batch, length):
    texts, expected = golden
    rng = np.random.default_rng(length)
    fitting = [i for i, text in enumerate(texts) if len(text["input_ids"]) <= length]
    if length == 256:
        fitting = fitting[::3]
    assert len(fitting) >= 10
    for start in range(0, len(fitting), batch):
        chosen = fitting[start : start + batch]
        ids = rng.integers(-(2**31), 2**31 - 1, (batch, length), dtype=np.int32)
        mask = np.zeros((batch, length), bool)
        for row, i in enumerate(chosen):
            tokens = texts[i]["input_ids"]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
        got = embed(ids, mask)
        assert np.isfinite(got).all()
        assert not got[len(chosen) :].any()
        want = expected[chosen]
        assert np.abs(got[: len(chosen)] - want).max() <= 1e-5
        assert (got[: len(chosen)] * want).sum(1).min() >= 0.99999


def test_P11_junk_in_padding_and_neighbours_change_no_bit(embed, golden):
    texts, _ = golden
    tokens = texts[0]["input_ids"]
    mask = np.zeros((4, 31), bool)
    mask[2, : len(tokens)] = True
    plain = np.zeros((4, 31), np.int32)
    plain[2, : len(tokens)] = tokens
    junk = np.random.default_rng(0).integers(0, 30_000, (4, 31), dtype=np.int32)
    junk[2, : len(tokens)] = tokens
    full = mask.copy()
    full[[0, 1, 3]] = True
    quiet = embed(plain, mask)[2]
    np.testing.assert_array_equal(quiet, embed(junk, mask)[2])
    np.testing.assert_array_equal(quiet, embed(junk, full)[2])


def test_what_is_served_is_declared(minilm):
    assert minilm.limits == {"length": 256}
    assert minilm.inputs == {"ids": "int32[length] = 0", "mask": "mask[length]"}
    assert minilm.task == "embedding"
    assert minilm.config["dimensions"] == 384
    assert minilm.config["pooling"] == "mean"
    assert minilm.config["normalize"] is True
    assert minilm.config["tensors_left_out"] == [
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(minilm.params)} == {np.dtype("float32")}
