"""Thousands of random requests against the rule, each as if it had been alone."""

import numpy as np
import pytest

PREFIXES = [np.random.default_rng(1).integers(2, 60, size).tolist() for size in (3, 8, 16, 21)]


def random_request(rng):
    prompt = rng.integers(2, 60, rng.integers(1, 12)).tolist()
    if rng.random() < 0.5:
        prompt = PREFIXES[rng.integers(len(PREFIXES))] + prompt[: rng.integers(0, 12)]
    params = {"max_tokens": min(int(rng.integers(1, 24)), 49 - len(prompt))}  # of 12 pages of 4
    if rng.random() < 0.3:
        params |= {"temperature": 1.0, "seed": int(rng.integers(1, 1 << 32))}
    if rng.random() < 0.2:
        params["frequency_penalty"] = 0.5
    if rng.random() < 0.2:
        params["stop"] = (chr(rng.integers(40, 90)), chr(rng.integers(40, 90)) + chr(rng.integers(40, 90)))
    if rng.random() < 0.3:
        params["ignore_eos"] = True
    options = {"priority": int(rng.integers(1, 10)), "salt": ["a", "b", None][rng.integers(3)]}
    return prompt, params, options


def play(bench, rng, count):
    live, everyone = [], []
    while count or live:
        for _ in range(min(count, int(rng.poisson(0.7)))):
            prompt, params, options = random_request(rng)
            live.append(bench.ask(prompt, **options, **params))
            everyone.append(live[-1])
            count -= 1
        if live and rng.random() < 0.05:
            bench.desk.cancel(live[rng.integers(len(live))].who)
        if not bench.quiet or bench.desk._news.added:
            bench.turn()
        live = [caller for caller in live if not caller.over]
        bench.books.pool.check([one.pages for one in bench.books.running.values()])
    return everyone


@pytest.mark.parametrize(
    ("seed", "count", "options"),
    [
        (0, 2000, {}),
        (1, 2000, {"pages": 14}),
        (2, 1500, {"pages": 14, "depth": 1}),
        (3, 1500, {"pages": 40, "steps": 4}),
        (4, 1500, {"pages": 14, "cache": False}),
        (5, 1500, {"pages": 16, "rows": 3, "depth": 3}),
        (6, 1500, {"pages": 30, "page_size": 3, "buckets": ((1, 5),)}),
        (7, 1500, {"pages": 14, "words": 4, "draft": 3, "rows": 3}),
        (8, 1500, {"pages": 40, "words": 3, "draft": 7, "rows": 4, "steps": 2}),
    ],
)
def test_each_text_is_the_one_it_has_alone(bench, seed, count, options):
    bench = bench(**options)
    everyone = play(bench, np.random.default_rng(seed), count)
    cancelled = 0
    for caller in everyone:
        if caller.done:
            assert caller.ids == bench.alone(caller)
            assert not any(stop in caller.text for stop in caller.params.stop)
        else:
            assert caller.error.reason == "cancelled"
            assert caller.ids == bench.alone(caller)[: len(caller.ids)]
            cancelled += 1
    assert 0 < cancelled < count / 3
    if options.get("pages", 64) < 20:
        assert bench.books.preemptions
    if options.get("cache", True):
        assert bench.books.cache.hit_tokens
    bench.settle()


def test_a_step_that_fails_is_computed_again(bench):
    bench = bench()
    callers = [bench.ask([5, 6, 7, i], max_tokens=9, ignore_eos=True) for i in range(8)]
    bench.programs.broken |= {0, 5, 9}
    bench.run(*callers)
    failed = [caller for caller in callers if caller.error]
    for caller in callers:
        if caller.done:
            assert caller.ids == bench.alone(caller)
        else:
            assert caller.error.reason == "model"
    later = bench.ask([5, 6, 7, 0], max_tokens=9)
    bench.run(later)
    assert later.ids == bench.alone(later)
    assert failed  # hit twice
    bench.settle()
