"""Flags and counts are data: whatever a request asks for, the programs are those of the warm-up."""

import pytest
from servax.server.errors import BadRequest
from servax.server.generation import SamplingParams

PROMPT = [5, 9, 40, 7, 11]
PLAIN = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
FIRSTS = (
    {"logprobs": 3},
    {"logprobs": 0},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.7},
    {"logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    {"stop_ids": (7,), "min_tokens": 2},
)


@pytest.mark.parametrize("steps", [1, 4])
def test_C3_the_first_request_with_any_flag_compiles_nothing(serve, compiles, steps):
    server = serve(decode_steps=steps, decode_rows=(1, 3, 8) if steps == 1 else (8,))
    with compiles.none():
        plain = server.generate(PROMPT, SamplingParams(**PLAIN))
        for flags in FIRSTS:
            out = server.generate(PROMPT, SamplingParams(**PLAIN | flags))
            assert 1 <= len(out.ids) <= 6
            wanted = flags.get("logprobs")
            assert len(out.logprobs) == (0 if wanted is None else len(out.ids))
            assert all(len(one.top) == wanted for one in out.logprobs)
        # Nor does any of them stay: the next plain request is what the first was.
        assert server.generate(PROMPT, SamplingParams(**PLAIN)).ids == plain.ids


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"logprobs": 4}, "logprobs"),
        ({"logit_bias": dict.fromkeys(range(5), 1.0)}, "logit_bias"),
        ({"stop_ids": (3, 4, 5, 6, 7)}, "stop_ids"),
    ],
)
def test_C3_a_flag_that_was_not_planned_is_refused_by_name(serve, compiles, flags, name):
    server = serve()
    with compiles.none():
        with pytest.raises(BadRequest, match=rf"^{name} is at most \d here; got \d"):
            server.generate(PROMPT, SamplingParams(**PLAIN | flags))
        assert len(server.generate(PROMPT, SamplingParams(**PLAIN)).ids) == 6
    with pytest.raises(TypeError, match="draft_tokens"):
        SamplingParams(**PLAIN, draft_tokens=4)
