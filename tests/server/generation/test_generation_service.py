"""Order of service, deadlines and the door, on an engine over whole numbers."""

import numpy as np
import pytest
from servax.server.errors import BadRequest


def test_a_long_prompt_does_not_stall_a_running_text(bench):
    bench = bench(pages=300, max_tokens=600)
    text = bench.ask([5, 6, 7], max_tokens=60, ignore_eos=True)
    bench.turn(3)
    long = bench.ask(np.arange(400) % 50 + 2, max_tokens=3)
    got = len(text.ids)
    for _ in range(20):
        bench.turn()
        assert len(text.ids) == got + 1
        got += 1
    assert not long.ids
    bench.run(text, long)
    bench.settle()


def test_deadlines_end_waiting_and_running_requests(bench):
    bench = bench(rows=1)
    running = bench.ask([5, 6], max_tokens=50, ignore_eos=True, deadline_s=1.0)
    waiting = bench.ask([5, 7], max_tokens=5, deadline_s=2.0)
    bench.turn(4)
    bench.clock.advance(1.5)
    bench.turn()
    assert running.error.reason == "deadline"
    assert waiting.error is None
    bench.run()
    assert waiting.done
    bench.settle()


def test_more_urgent_requests_go_first(bench):
    bench = bench(rows=1)
    low, high = bench.ask([5], max_tokens=3, priority=9), bench.ask([6], max_tokens=3, priority=1)
    bench.run(high)
    assert not low.ids
    bench.settle()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is at least 1"),
        ({"max_tokens": 2.5}, "max_tokens is an integer or None; got 2.5"),
        ({"max_tokens": "5"}, "max_tokens is an integer or None; got '5'"),
        ({"seed": 1.5}, "seed is an integer or None"),
        ({"top_k": 2.5}, "top_k is an integer"),
        ({"temperature": None}, "temperature is a number; got None"),
        ({"temperature": "1"}, "temperature is a number; got '1'"),
        ({"stop_ids": ("2",)}, "stop_ids is integers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias is numbers by integer token"),
        ({"logit_bias": {5: -1e39}}, "logit_bias holds finite numbers up to 1e"),
        ({"temperature": float("nan")}, "temperature is from 0 to 100; got nan"),
        ({"top_p": 0.0}, "top_p is above 0 to 1; got 0.0"),
        ({"stop": ("",)}, "stop is one or more strings of at least one character"),
        ({"stop": "ab"}, "stop is one or more strings"),
        ({"logit_bias": {64: 1.0}}, "tokens in stop_ids and logit_bias are 0 to 63"),
        ({"logit_bias": {2: float("inf")}}, "logit_bias holds finite numbers"),
        ({"logit_bias": dict.fromkeys(range(5), 1.0)}, "logit_bias is at most 4 here; got 5"),
        ({"logprobs": 4}, "logprobs is at most 3 here; got 4"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is at most max_tokens"),
        ({"seed": 1 << 64}, "seed is an integer of 64 bits"),
    ],
)
def test_bad_parameters_are_refused_at_the_door(bench, params, message):
    with pytest.raises(BadRequest, match=message):
        bench().ask([5], **params)


@pytest.mark.parametrize("prompt", [[], [64], [-1], [[1]], [0.5]])
def test_bad_prompts_are_refused_at_the_door(bench, prompt):
    with pytest.raises(BadRequest):
        bench().ask(prompt)


def test_numbers_of_numpy_are_taken_as_numbers(bench):
    bench = bench()
    given = {
        "seed": np.int64(-3),
        "max_tokens": np.int32(4),
        "temperature": np.float32(0.5),
        "top_k": np.uint8(9),
    }
    asked = [
        bench.ask([5, 6], ignore_eos=True, **one) for one in (given, {k: v.item() for k, v in given.items()})
    ]
    bench.run(*asked)
    assert asked[0].ids == asked[1].ids
    assert len(asked[0].ids) == 4
    bench.settle()


def test_one_that_cannot_be_booked_fails_alone_and_gives_all_back(bench, monkeypatch):
    bench = bench()
    table, refused = bench.engine.books.table, []
    join = table.join

    def picky(slot, params, *rest):
        if params.top_k == 7:
            refused.append(slot)
            raise OverflowError("no such number")
        join(slot, params, *rest)

    monkeypatch.setattr(table, "join", picky)
    running = bench.ask([5, 6], max_tokens=20, ignore_eos=True)
    bench.turn(3)
    bad, good = bench.ask([5, 6, 7], top_k=7), bench.ask([5, 6, 8], max_tokens=3, ignore_eos=True)
    bench.run(running, good)
    assert len(refused) == 1
    assert bad.error.reason == "model"
    assert (len(running.ids), len(good.ids)) == (20, 3)
    bench.settle()
