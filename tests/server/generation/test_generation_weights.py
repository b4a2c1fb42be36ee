"""Texts of a small decoder whose matrices are in bfloat16."""

import jax
import numpy as np
from servax.models import tiny
from servax.server.generation import GenerationServer, SamplingParams

PROMPTS = ([5, 6, 7], [9] * 20, [3, 200, 4, 100])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_each_token_is_the_best_or_as_good_as_it():
    """A sum in another order is rounded to another eighth bit now and then."""
    model = tiny(weights="bfloat16")
    options = {"pages": 40, "page_size": 8, "prefill_buckets": ((1, 16),), "mixed_buckets": ()}
    with GenerationServer(model, **options, max_rows=1) as server:
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(server.engine.programs.params)} == {
            "bfloat16",
            "float32",
        }
        outs = [server.generate(list(prompt), GREEDY).ids for prompt in PROMPTS]
    ids = np.zeros((3, 32), np.int32)
    lengths = [len(prompt) + 8 for prompt in PROMPTS]
    for row, (prompt, out) in enumerate(zip(PROMPTS, outs, strict=True)):
        ids[row, : lengths[row]] = [*prompt, *out]
    logits = np.asarray(jax.jit(model.forward)(model.params, ids=ids, lengths=np.array(lengths, np.int32)))
    for row, (prompt, out) in enumerate(zip(PROMPTS, outs, strict=True)):
        after = logits[row, len(prompt) - 1 : len(prompt) + 7]
        assert (after[np.arange(8), out] > after.max(axis=1) - 0.15 * after.std()).all()
