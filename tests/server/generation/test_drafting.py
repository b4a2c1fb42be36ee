"""What is guessed, and when checking it is chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.server.errors import ConfigError
from servax.server.generation import SamplingParams
from servax.server.generation.chunking import Bucket
from servax.server.generation.drafting import Drafter, Drafting, Pace, drafter, expected, verify_buckets
from servax.server.generation.programs import Key

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def a_drafter(tokens, *, prompt=1, length=5):
    made = Drafter(np.array(tokens[:prompt], np.int32), len(tokens) + 100, length)
    for token in tokens[prompt:]:
        made.push(token)
    return made


def followed(tokens, length):
    """The rule in plain Python: the last place of the longest match, and what came after it."""
    for matched in range(min(3, len(tokens) - 1), 0, -1):
        end = tokens[-matched:]
        places = [at for at in range(matched, len(tokens)) if tokens[at - matched : at] == end]
        if places:
            whole = list(tokens)
            for step in range(length):
                whole.append(whole[places[-1] + step])
            return whole[len(tokens) :]
    return []


@given(texts, st.integers(1, 6), st.data())
def test_a_guess_is_what_followed_the_last_longest_match(tokens, length, data):
    prompt = data.draw(st.integers(1, len(tokens)))
    assert a_drafter(tokens, prompt=prompt, length=length).guess() == followed(tokens, length)


def test_a_text_that_turns_in_a_circle_is_guessed_beyond_its_end():
    assert a_drafter([7, 8, 9, 8, 9], length=5).guess() == [8, 9, 8, 9, 8]
    assert a_drafter([7, 8, 9], length=5).guess() == []


def test_odds_follow_what_was_right_whether_a_step_tried_it_or_not():
    good, bad = a_drafter([1, 2, 3, 4] * 2), a_drafter([1, 2, 3, 4] * 2)
    begin = good.odds if good.guess() else None
    for step in range(8):
        good.guess(), bad.guess()
        good.push([1, 2, 3, 4][step % 4])
        bad.push(50 + step)
    good.guess()
    assert good.odds > begin
    bad.push(1)
    bad.push(2)
    bad.push(3)
    assert bad.guess()[0] == 4
    assert bad.odds < begin


def test_all_tokens_of_a_step_count():
    one, other = (a_drafter([1, 2, 3, 4] * 2, length=4) for _ in range(2))
    for token in one.guess():
        one.push(token)
    for token in other.guess():
        other.push(token)
        other.guess()
    assert one.guess()
    assert other.guess()
    assert one.odds == other.odds


class Seconds(dict):
    """A pace that is known."""

    def of(self, key):
        return self.get(key)


def deciding(seconds, buckets=((1, 4), (1, 8), (2, 4))):
    made = Drafting([Bucket(*b) for b in buckets], (1, 2, 4))
    made.pace = Seconds(seconds)
    return made


ONE, FOUR, EIGHT = Key("decode", 1, 1), Key("verify", 1, 4), Key("verify", 1, 8)


def repeating(length=7):
    return a_drafter([1, 2, 3, 4, 5] * 3, length=length)


@pytest.mark.parametrize(
    ("seconds", "chunk"),
    [
        ({ONE: 1.0, FOUR: 1.2, EIGHT: 1.4}, 8),
        ({ONE: 1.0, FOUR: 1.2, EIGHT: 3.0}, 4),
        ({ONE: 1.0, FOUR: 4.0, EIGHT: 9.0}, None),
        ({ONE: 1.0}, None),
        ({FOUR: 1.0, EIGHT: 1.0}, None),
    ],
)
def test_the_step_with_most_tokens_a_second_is_chosen(seconds, chunk):
    draft = deciding(seconds).choose([repeating()], [100])
    assert (draft and draft.bucket.chunk) == chunk
    if chunk:
        assert draft.guesses == [[1, 2, 3, 4, 5, 1, 2][: chunk - 1]]


def test_no_more_is_guessed_than_a_text_may_have():
    cheap = {ONE: 1.0, FOUR: 1e-3, EIGHT: 1e-3}
    assert deciding(cheap).choose([repeating()], [3]).guesses == [[1, 2]]
    assert deciding(cheap).choose([repeating()], [1]) is None


def test_texts_without_guesses_pay_for_those_with():
    rows = {Key("decode", 2, 1): 1.0, Key("verify", 2, 4): 1.9}
    assert deciding(rows).choose([repeating(), repeating()], [9, 9]) is not None
    assert deciding(rows).choose([repeating(), None], [9, 9]) is None
    assert deciding(rows).choose([repeating()] * 3, [9] * 3) is None  # there is no such program


def test_launches_of_several_steps_are_weighed_as_such():
    seconds = {ONE: 6.0, Key("decode", 1, 16): 21.0, FOUR: 6.0, EIGHT: 6.0}
    text = repeating()
    assert deciding(seconds).choose([text], [100]) is not None
    assert deciding(seconds).choose([text], [100], 16) is None  # 0.4 tokens a second instead of 0.8


def noted(seconds):
    made = deciding({})
    made.pace = Pace()
    for key, one in seconds.items():
        made.pace.note(key, one)
    return made


def test_one_pause_does_not_end_guessing():
    one = noted({ONE: 0.013, FOUR: 0.016, EIGHT: 0.02})
    for key in (FOUR, EIGHT):
        one.pace.note(key, 5.0)
    assert one.choose([repeating()], [100]) is not None


def test_guesses_are_tried_again_after_others_used_the_device():
    one = noted({ONE: 0.013, FOUR: 0.016, EIGHT: 0.02})
    for _ in range(60):
        for key in (FOUR, EIGHT):
            one.pace.note(key, 0.1)
    assert one.choose([repeating()], [100]) is None
    for _ in range(400):
        one.pace.note(ONE, 0.013)
    assert one.choose([repeating()], [100]) is not None


def test_expected_tokens():
    assert expected(0.0, 5) == 1.0
    assert expected(1.0, 5) == 6.0
    assert expected(0.5, 2) == 1.75


@given(st.integers(1, 16), st.integers(1, 32))
def test_programs_take_all_guesses_of_one_text_and_some_of_every_number(tokens, rows):
    buckets = verify_buckets(tokens, rows)
    assert Bucket(1, tokens + 1) in buckets
    assert max(bucket.rows for bucket in buckets) == rows
    assert all(bucket.rows * bucket.chunk <= max(4 * rows, tokens + 1) for bucket in buckets)


def test_nothing_is_guessed_where_penalties_count_the_tokens_before():
    prompt = np.array([1, 2], np.int32)
    assert drafter(prompt, SamplingParams(), 5, 3) is not None
    assert drafter(prompt, SamplingParams(frequency_penalty=0.1), 5, 3) is None
    assert drafter(prompt, SamplingParams(), 5, 0) is None


# -- in the engine ---------------------------------------------------------------------------------------


def test_a_text_is_the_same_and_takes_fewer_steps(bench):
    plain, guessing = (bench(words=3, draft=draft) for draft in (0, 3))
    for one in (plain, guessing):
        caller = one.ask([5, 6, 7], max_tokens=200, ignore_eos=True)
        one.run(caller)
        assert caller.ids == one.alone(caller)
        one.settle()
    checked = [record for record in guessing.records if record.kind == "verify"]
    accepted = sum(record.accepted for record in checked)
    assert 0 < accepted < sum(record.drafted for record in checked)
    assert len(guessing.records) < len(plain.records) - accepted / 2


def test_a_step_in_flight_is_read_before_the_next_is_guessed(bench):
    one = bench(words=3, draft=3)
    caller = one.ask([5, 6, 7], max_tokens=100, ignore_eos=True)
    while not caller.over:
        one.turn()
        assert sum(flight.guesses for flight in one.engine._flights) <= 1
    one.settle()


def test_more_texts_than_programs_take_are_not_guessed(bench):
    one = bench(words=3, draft=3)
    callers = [one.ask([5, 6, i], max_tokens=20 + 5 * i, ignore_eos=True) for i in range(5)]
    one.run(*callers)
    assert all(record.kind != "verify" for record in one.records if record.real > 4)
    assert any(record.kind == "verify" for record in one.records)  # once some are over
    one.settle()


def test_guesses_wait_where_there_are_no_pages_for_them(bench):
    one = bench(words=3, draft=3, pages=5)
    caller = one.ask([5, 6, 7], max_tokens=9, ignore_eos=True)  # the whole pool, to the last place
    one.run(caller)
    assert caller.ids == one.alone(caller)
    one.settle()


def test_a_model_that_cannot_check_is_refused(bench, monkeypatch):
    monkeypatch.setattr("servax.server.generation.fake.FakeModel.verify_step", None)
    with pytest.raises(ConfigError, match="fake has none: leave draft_tokens out"):
        bench(draft=3)
    bench()


def test_a_negative_number_is_refused(bench):
    with pytest.raises(ConfigError, match="draft_tokens is at least 0; got -1: leave it out"):
        bench(draft=-1)


def test_more_guesses_than_a_text_has_tokens_are_refused(bench):
    with pytest.raises(ConfigError, match="less than a text can have, 256 tokens; got 256: a few are enough"):
        bench(draft=256)


def test_weights_of_priorities_count_the_tokens_that_stand(bench):
    one = bench(words=2, draft=7, rows=1, mixed=(), priorities="1=1,5=1")
    urgent = [one.ask([5, 6, 7], priority=1, max_tokens=40, ignore_eos=True) for _ in range(15)]
    # Nothing is guessed for these.
    others = [one.ask([5, 6, 7], max_tokens=40, ignore_eos=True, frequency_penalty=0.5) for _ in range(15)]
    while sum(caller.over for caller in urgent + others) < 14:
        one.turn()
    assert sum(record.accepted for record in one.records) > 0
    assert sum(caller.over for caller in urgent) == sum(caller.over for caller in others)
    one.settle()
