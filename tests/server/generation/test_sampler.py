"""The sampler alone: against a plain computation in NumPy, and against frequencies."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.server.generation import rows as r
from servax.server.generation.params import SamplingParams
from servax.server.generation.rows import RowTable
from servax.server.generation.sampler import _truncated, choose

VOCAB = 37
pytestmark = pytest.mark.usefixtures("strict_numerics")


@functools.cache
def program(rows):
    return jax.jit(functools.partial(choose, tops=5))


def batch_of(params, seeds=None, steps=None):
    count = len(params)
    table = RowTable(count, width=1, biases=6)
    for slot, one in enumerate(params):
        table.join(slot, one, seeds[slot] if seeds is not None else slot, (1, 2))
        table.ints[slot, [r.LENGTH, r.SAMPLE]] = 1
        if steps is not None:
            table.ints[slot, r.STEP] = steps[slot]
    names = {"ints": table.ints, "floats": table.floats, "bias_ids": table.bias_ids, "bias": table.bias}
    return {name: array[:count] for name, array in names.items()}


def truncated_plainly(weights, top_k, top_p, min_p):
    order = np.sort(weights)[::-1]
    if top_k:
        weights = np.where(weights >= order[min(top_k, len(order)) - 1], weights, 0)
    if top_p < 1:
        order = np.sort(weights)[::-1]
        # The least value at which the kept tokens have the mass.
        at = np.searchsorted(
            np.cumsum(order, dtype=np.float64), top_p * order.sum(dtype=np.float64) * (1 - 1e-6)
        )
        weights = np.where(weights >= order[min(at, len(order) - 1)], weights, 0)
    return np.where(weights >= min_p, weights, 0)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 2, 5, 36, 37, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
)
def test_truncation_equals_sorting(seed, top_k, top_p, min_p, spread):
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * np.float32(spread)
    weights = np.exp(logits - logits.max())
    batch = batch_of([SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)])
    got = np.asarray(jit_truncated()(weights[None], batch["ints"], batch["floats"]))[0]
    np.testing.assert_array_equal(got, truncated_plainly(weights, top_k, top_p, min_p))


@functools.cache
def jit_truncated():
    return jax.jit(_truncated)


def test_rows_of_every_kind_in_one_batch():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={9: 50.0, 8: 49.0}),
        SamplingParams(temperature=0.0, min_tokens=3, logit_bias={1: 90.0, 2: 80.0, 7: 70.0}),
        SamplingParams(temperature=0.5, top_k=2, logprobs=2),
    ]
    out = program(4)(logits, np.zeros((5, VOCAB), np.int32), batch_of(params, steps=[0, 0, 2, 0]))
    tokens = np.asarray(out.tokens)
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == 9
    assert tokens[2] == 7  # 1 and 2 end the text, which may not be before its third token
    assert tokens[3] in np.argsort(logits[3])[-2:]
    expected = logits[3] - np.log(np.exp(logits[3]).sum())
    assert np.asarray(out.logprobs)[3] == pytest.approx(expected[tokens[3]], abs=1e-5)
    assert np.asarray(out.top_ids)[3].tolist() == np.argsort(-logits[3])[:5].tolist()
    later = program(4)(logits, np.zeros((5, VOCAB), np.int32), batch_of(params, steps=[3, 3, 3, 3]))
    assert np.asarray(later.tokens)[2] == 1


def test_penalties_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    text, prompt = rng.integers(0, 3, (3, VOCAB)), rng.integers(0, 2, (3, VOCAB))
    seen = np.concatenate([text + (prompt << 16), np.zeros((1, VOCAB), int)]).astype(np.int32)
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, presence_penalty=0.6),
        SamplingParams(temperature=0.0, frequency_penalty=0.9),
    ]
    tokens = np.asarray(program(3)(logits, seen, batch_of(params)).tokens)
    repeated = np.where(logits[0] > 0, logits[0] / 1.7, logits[0] * 1.7)
    expected = [
        np.where(text[0] + prompt[0] > 0, repeated, logits[0]),
        logits[1] - 0.6 * (text[1] > 0),
        logits[2] - 0.9 * text[2],
    ]
    assert tokens.tolist() == [int(row.argmax()) for row in expected]


def test_draws_have_the_models_frequencies():
    logits = np.tile(np.array([0.0, 1.0, 2.0, -1.0, -40.0], np.float32), (1000, 1))
    expected = np.exp(logits[0] / 1.5) / np.exp(logits[0] / 1.5).sum()
    params = [SamplingParams(temperature=1.5)] * 1000
    counts = np.zeros(5)
    for step in range(20):
        out = program(1000)(logits, np.zeros((1001, 5), np.int32), batch_of(params, steps=[step] * 1000))
        counts += np.bincount(np.asarray(out.tokens), minlength=5)
    assert abs(counts / counts.sum() - expected).max() < 0.012  # 3.5 standard deviations of 20,000 draws


def test_rows_whose_logits_are_not_finite_are_told():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 3] = np.nan
    logits[2, 3] = np.inf
    out = program(3)(logits, np.zeros((4, VOCAB), np.int32), batch_of([SamplingParams(temperature=0.0)] * 3))
    assert np.asarray(out.finite).tolist() == [True, False, False]


def test_no_combination_of_parameters_compiles(compiles):
    logits = np.zeros((2, VOCAB), np.float32)
    run = program(2)
    run(logits, np.zeros((3, VOCAB), np.int32), batch_of([SamplingParams()] * 2))
    with compiles.none():
        for one in (
            {"temperature": 0.0},
            {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
            {"repetition_penalty": 2.0, "logit_bias": {3: 1.0}, "logprobs": 5},
        ):
            run(logits, np.zeros((3, VOCAB), np.int32), batch_of([SamplingParams(**one), SamplingParams()]))
