"""The whole of it over a small decoder with random weights, on the device and in threads."""

import asyncio

import jax
import numpy as np
import pytest
from servax.server.errors import (
    ConfigError,
)
from servax.server.generation import GenerationServer, SamplingParams, StateFault

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def replace(params=GREEDY, **changes):
    values = {name: getattr(params, name) for name in SamplingParams.__slots__}
    return SamplingParams(**{**values, **changes})


def gather(server, jobs):
    async def go():
        return await asyncio.gather(
            *(server.agenerate(prompt, params) for prompt, params in jobs), return_exceptions=True
        )

    return asyncio.run(go())


def random_prompts(seed, count, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_G1_each_of_many_streams_equals_its_text_alone(serve, greedy, compiles):
    server = serve()
    prompts = random_prompts(0, 64)
    with compiles.none():
        outs = gather(server, [(prompt, GREEDY) for prompt in prompts])
    expected = [greedy(prompt, 12) for prompt in prompts]
    assert [out.ids for out in outs] == expected


def test_random_joins_leaves_cancels_and_preemptions_equal_solo_runs(serve, greedy, compiles, tight):
    server = serve(**tight)
    rng = np.random.default_rng(5)
    pool = random_prompts(6, 30, 24)
    beginning = pool[0][:8] + pool[1][:8]

    async def one(prompt, params, leave):
        await asyncio.sleep(0)
        ids = []
        async for delta in server.stream(prompt, params):
            ids += delta.ids
            if leave is not None and len(ids) >= leave:
                break
        return tuple(ids)

    async def go(jobs):
        limit = asyncio.Semaphore(24)

        async def bounded(job):
            async with limit:
                return await one(*job)

        return await asyncio.gather(*map(bounded, jobs))

    jobs = []
    for i in range(150):
        prompt = pool[i % 30] if rng.random() < 0.6 else beginning + pool[i % 30][:6]
        params = replace(max_tokens=int(rng.integers(1, 20)), ignore_eos=bool(rng.random() < 0.7))
        jobs.append((prompt, params, int(rng.integers(1, 6)) if rng.random() < 0.2 else None))
    with compiles.none():
        outs = asyncio.run(go(jobs))
    for (prompt, params, leave), ids in zip(jobs, outs, strict=True):
        whole = greedy(prompt, params.max_tokens, eos=not params.ignore_eos)
        assert ids == (whole if leave is None else whole[: len(ids)])
        assert leave is None or len(ids) >= min(leave, len(whole))
    assert server.engine.books.preemptions
    assert server.engine.books.cache.hit_tokens


def test_several_steps_in_one_program_give_the_same_text(serve, greedy):
    server = serve(decode_steps=4, decode_rows=(8,))
    prompts = random_prompts(0, 5)
    outs = gather(server, [(prompt, replace(max_tokens=11)) for prompt in prompts])
    assert [out.ids for out in outs] == [greedy(prompt, 11) for prompt in prompts]
    seeded = replace(temperature=1.0, seed=3, max_tokens=11)
    assert server.generate(prompts[0], seeded).ids == serve().generate(prompts[0], seeded).ids


@pytest.mark.parametrize("length", [20, 24])
def test_G5_a_hit_gives_what_a_miss_gave(serve, greedy, length):
    server = serve()
    prompt = random_prompts(9, 1)[0] * 30
    params = replace(logprobs=3)
    miss, hit = (server.generate(prompt[:length], params) for _ in range(2))
    assert (miss.usage.cached_tokens, hit.usage.cached_tokens) == (0, 16 if length == 20 else 23)
    assert miss.ids == hit.ids == greedy(prompt[:length], 12)
    for one, other in zip(miss.logprobs, hit.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_G5_logprobs_are_bitwise_equal_where_chunks_are_pages(serve):
    server = serve(prefill_buckets=((1, 8),))
    prompt = random_prompts(9, 1)[0] * 30
    miss, hit = (server.generate(prompt[:20], replace(logprobs=3)) for _ in range(2))
    assert hit.usage.cached_tokens == 16
    assert miss.logprobs == hit.logprobs


def test_G6_a_full_pool(serve, greedy, tight):
    server = serve(**tight)
    prompts = random_prompts(11, 8, 12)
    outs = gather(server, [(prompt, replace(max_tokens=40)) for prompt in prompts])
    assert [out.ids for out in outs] == [greedy(prompt, 40) for prompt in prompts]
    assert server.engine.books.preemptions


def test_G7_pages_of_four_and_pools_full_of_nan(serve, greedy):
    server = serve(page_size=4, pages=40, prefill_buckets=((8, 4),), decode_rows=(8,))
    programs = server.engine.programs
    shapes = programs.state["kv"]
    programs.state["kv"] = {
        name: jax.device_put(np.full(part.shape, np.nan, np.float32)) for name, part in shapes.items()
    }
    prompts = [random_prompts(3, 1)[0][:5], random_prompts(4, 1)[0][:7]]
    outs = gather(server, [(prompt, GREEDY) for prompt in prompts])
    assert [out.ids for out in outs] == [greedy(prompt, 12) for prompt in prompts]


def test_G9_a_seed_reproduces_at_batch_1_3_and_8(serve):
    server = serve()
    draw = replace(temperature=1.0, max_tokens=16)
    prompt = random_prompts(1, 1)[0]
    alone = server.generate(prompt, replace(draw, seed=7)).ids
    for beside in (2, 7):
        jobs = [(prompt, replace(draw, seed=7))] + [(prompt, draw)] * beside
        outs = [out.ids for out in gather(server, jobs)]
        assert outs[0] == alone
        assert len(set(outs)) == beside + 1
    rich = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {5: 2.0}}
    one = replace(draw, seed=-3, frequency_penalty=0.2, presence_penalty=0.1, **rich)
    alone = server.generate(prompt, one).ids
    assert gather(server, [(prompt, one), (prompt, draw), (prompt, GREEDY)])[0].ids == alone


def test_G9_the_key_is_the_seed_folded_with_the_step(serve):
    server = serve()
    prompt = random_prompts(1, 1)[0]
    out = server.generate(prompt, replace(temperature=1.0, seed=7, max_tokens=3))
    tokens = list(prompt)
    for step, token in enumerate(out.ids):
        logits = server.model.forward(
            server.model.params, ids=np.array([tokens], np.int32), lengths=np.array([len(tokens)], np.int32)
        )[0, -1]
        weights = np.pad(np.exp(logits - logits.max()), (0, -len(logits) % 64)).reshape(-1, 64)
        key = jax.random.fold_in(jax.random.PRNGKey(7), step)
        waits = -np.log(jax.random.uniform(key, (sum(weights.shape),), minval=np.finfo(np.float32).tiny))
        block = np.argmax(weights.sum(axis=1) / waits[:-64])  # a block of 64 tokens, then one of them
        assert block * 64 + np.argmax(weights[block] / waits[-64:]) == token
        tokens.append(token)


def test_preempted_draws_and_penalties_go_on_where_they_were(serve, tight):
    roomy, narrow = serve(), serve(**tight)
    prompts = random_prompts(21, 8, 12)
    jobs = [
        (
            prompt,
            replace(temperature=1.0, seed=i, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=40),
        )
        for i, prompt in enumerate(prompts)
    ]
    expected = [roomy.generate(*job).ids for job in jobs]
    assert [out.ids for out in gather(narrow, jobs)] == expected
    assert narrow.engine.books.preemptions


def test_G10_the_pool_is_updated_in_place_and_only_the_state_is_donated(serve):
    server = serve()
    programs = server.engine.programs
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(programs.state))
    for key, alias in programs.alias_bytes.items():
        if key.kind != "zeros":
            assert programs.kv_bytes <= alias <= state_bytes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(programs.params))


def test_G10_one_buffer_twice_is_refused_before_the_run(serve):
    programs = serve().engine.programs
    twice = {**programs.state, "kv": dict.fromkeys(programs.state["kv"], programs.state["kv"]["k"])}
    with pytest.raises(StateFault, match="two share one"):
        programs.install(twice)


def test_G10_nan_debugging_is_refused_at_start(tiny):
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(ConfigError, match="jax_debug_nans is on"):
            GenerationServer(tiny)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_G12_a_row_whose_logits_are_nan_fails_alone(serve, greedy, tiny):
    server = serve()
    prompts = random_prompts(30, 4, 10)
    step = server.engine.programs.step
    count = iter(range(1000))

    def poisoned(key, batch):
        out = step(key, batch)
        if key.kind == "decode" and next(count) == 4:
            finite = np.asarray(out.finite).copy()
            finite[0, 2] = False
            out = out._replace(finite=finite)
        return out

    server.engine.programs.step = poisoned
    outs = gather(server, [(prompt, GREEDY) for prompt in prompts])
    failed = [i for i, out in enumerate(outs) if isinstance(out, Exception)]
    assert len(failed) == 1
    assert "not finite" in str(outs[failed[0]])
    for i in set(range(4)) - set(failed):
        assert outs[i].ids == greedy(prompts[i], 12)


def test_a_device_that_fails_loses_no_request(serve, greedy):
    server = serve()
    step = server.engine.programs.step
    count = iter(range(1000))

    def failing(key, batch):
        if next(count) == 6:
            for leaf in jax.tree.leaves(server.engine.programs.state):
                leaf.delete()
            raise RuntimeError("out of memory")
        return step(key, batch)

    server.engine.programs.step = failing
    prompts = random_prompts(31, 4, 10)
    outs = gather(server, [(prompt, GREEDY) for prompt in prompts])
    assert [out.ids for out in outs] == [greedy(prompt, 12) for prompt in prompts]
    assert server.live


def test_G8_text_streams_byte_safely_and_stops(serve):
    server = serve()
    prompt = random_prompts(40, 1)[0]
    whole = server.generate(prompt, replace(max_tokens=40))
    assert whole.text == server.model.tokenizer.decode(whole.ids)
    parts = list(server.iterate(prompt, replace(max_tokens=40)))
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.ids] == list(whole.ids)
    assert parts[-1].usage == whole.usage.__class__(len(prompt), 40, parts[-1].usage.cached_tokens)
    stop = whole.text[7:10]
    ended = server.generate(prompt, replace(max_tokens=40, stop=(stop,)))
    assert ended.text == whole.text[: whole.text.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)


def test_eos_min_tokens_stop_ids_and_bias(serve, greedy):
    server = serve()
    prompt = random_prompts(41, 1)[0]
    free = greedy(prompt, 12)
    out = server.generate(prompt, replace(stop_ids=(free[4],)))
    first = free.index(free[4])
    assert out.ids == free[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", free[4])
    later = server.generate(prompt, replace(stop_ids=(free[first],), min_tokens=first + 2))
    assert len(later.ids) >= first + 2
    assert free[first] not in later.ids[: first + 2]
    biased = server.generate(prompt, replace(logit_bias={77: 1000.0}))
    assert set(biased.ids) == {77}
    banned = server.generate(prompt, replace(logit_bias={77: 1000.0, 78: 999.0}, repetition_penalty=2.0))
    assert banned.ids[0] == 77
    ended = server.generate(prompt, replace(ignore_eos=False, logit_bias={2: 1000.0}))
    assert (ended.ids, ended.text, ended.finish_reason) == ((2,), "", "stop")
    assert server.generate(prompt, replace(presence_penalty=100.0, logit_bias={77: 50.0})).ids.count(77) == 1


def test_truncation_keeps_to_the_likely_tokens(serve):
    server = serve()
    prompt = random_prompts(42, 1)[0]
    base = replace(temperature=2.0, max_tokens=1, logprobs=3)
    top = [token for token, _ in server.generate(prompt, base).logprobs[0].top]
    for limits in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        outs = gather(server, [(prompt, replace(base, seed=i, **limits)) for i in range(20)])
        assert {out.ids[0] for out in outs} == {top[0]}
    outs = gather(server, [(prompt, replace(base, seed=i, top_k=3)) for i in range(60)])
    assert {out.ids[0] for out in outs} == set(top)


@pytest.mark.parametrize("name", ["prefill_buckets", "mixed_buckets"])
@pytest.mark.parametrize("bucket", [(0, 8), (8, 0), (8, -1)])
def test_programs_without_rows_or_tokens_are_refused(tiny, name, bucket):
    with pytest.raises(ConfigError, match=f"{name} have at least 1 row and 1 token"):
        GenerationServer(tiny, **{name: ((8, 8), bucket)})
