"""Guesses over a small decoder with random weights: nothing but the number of steps may change."""

import dataclasses

import numpy as np
import pytest
from servax.models import tiny
from servax.server.generation import SamplingParams

PROMPTS = [np.random.default_rng(i).integers(3, 259, 4 + 3 * i).tolist() for i in range(4)]
CIRCLE = [5, 6, 7, 8] * 4


@pytest.fixture
def servers(serve, eager):
    records = []
    plain, guessing = serve(), serve(draft_tokens=3, on_step=records.append)
    guessing.engine.books.drafting.pace = eager
    return plain, guessing, records


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.02, "seed": 3, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {9: 100.0}},  # so that every guess of 9 is right
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 10, "stop_ids": (9,)},
    ],
)
def test_a_text_is_the_one_without_guesses(servers, compiles, options):
    plain, guessing, _ = servers
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    with compiles.none():
        for prompt in [*PROMPTS, CIRCLE]:
            want, got = plain.generate(prompt, params), guessing.generate(prompt, params)
            assert (got.ids, got.text, got.finish_reason) == (want.ids, want.text, want.finish_reason)
            for one, other in zip(got.logprobs, want.logprobs, strict=True):
                assert one.token == other.token
                np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_it_takes_fewer_steps(servers):
    _, guessing, records = servers
    guessing.generate(CIRCLE, SamplingParams(max_tokens=41, temperature=0.0, logit_bias={9: 100.0}))
    checked = [record for record in records if record.kind == "verify"]
    assert sum(record.accepted for record in checked) >= 25
    assert len(records) <= 16
    assert all(record.drafted <= 3 * record.real for record in checked)


def test_counts_of_penalties_go_on_after_guesses_of_others(servers):
    """A row with penalties runs beside one whose guesses are checked."""
    plain, guessing, records = servers
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, frequency_penalty=0.7),
        SamplingParams(max_tokens=20, temperature=0.0, logit_bias={9: 100.0}),
    ]
    want = [plain.generate(PROMPTS[1], one).ids for one in params]
    streams = [guessing.iterate(PROMPTS[1], one) for one in params]
    got = [[], []]
    for at, stream in enumerate(streams):
        for delta in stream:
            got[at] += delta.ids
    assert [tuple(ids) for ids in got] == [tuple(ids) for ids in want]
    assert any(record.kind == "verify" and record.real == 2 for record in records)


def test_what_is_not_finite_ends_its_own_text_only(serve, eager):
    free = tiny(tied=False)  # else the word's own score would be NaN in every text
    word = np.array(free.params["word"])
    word[77] = np.nan
    broken = dataclasses.replace(free, params={**free.params, "word": word})
    server = serve(broken, draft_tokens=3)
    server.engine.books.drafting.pace = eager
    with pytest.raises(Exception, match="not finite"):
        server.generate([77, *CIRCLE], SamplingParams(max_tokens=5, temperature=0.0))
