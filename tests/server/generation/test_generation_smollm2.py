"""The default language model: 26 golden continuations together in one engine."""

import asyncio
import json
from pathlib import Path

import pytest
from servax.models import load
from servax.server.generation import GenerationServer, SamplingParams

TIE = 1e-3  # below this gap of the two best logits another order of summation may choose the other token


@pytest.mark.timeout(300)
def test_golden_continuations_in_one_batch(compiles):
    path = Path(__file__).parents[2] / "golden" / "smollm2_greedy.json"
    texts = json.loads(path.read_text(encoding="utf-8"))
    server = GenerationServer(
        load("smollm2"), pages=80, prefill_buckets=((4, 32),), mixed_buckets=((32, 16),), decode_rows=(32,)
    ).start()
    server.wait_ready(240)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=48, skip_special=False)

    async def go():
        return await asyncio.gather(*(server.agenerate(text["prompt_ids"], greedy) for text in texts))

    with compiles.none():
        outs = asyncio.run(go())
    for text, out in zip(texts, outs, strict=True):
        ties = [i for i, gap in enumerate(text["top2_gap"]) if gap < TIE]
        until = min([*ties, 48])
        assert list(out.ids[:until]) == text["tokens"][:until]
        if until == 48:
            assert out.text == text["text"]
    server.close()
    server.engine.books.check_idle()
