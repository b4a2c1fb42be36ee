import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import (
    FitError,
    Ladder,
    Scheme,
    SchemeError,
    as_scheme,
    bounded_waste,
    exact,
    explicit,
    fitted,
    geometric,
    linear,
    parse_scheme,
    powers_of_two,
    single,
)

RULES = [
    exact(),
    single(),
    linear(32),
    powers_of_two(),
    powers_of_two(8),
    geometric(1.5),
    geometric(1.1, 16, 8),
    bounded_waste(25),
    bounded_waste(12.5, 16),
    explicit([64, 128, 4096]),
    fitted([3, 5, 90, 200], 3, overflow="clip"),
]


@pytest.mark.parametrize("scheme", RULES, ids=lambda scheme: scheme.name)
def test_B1_every_ladder_ends_exactly_at_any_limit(scheme: Scheme) -> None:
    for limit in range(1, 2001):
        ladder = scheme.ladder(limit)
        assert ladder.limit == limit
        assert ladder.rung_for(1) <= limit
    # A Ladder's rungs rise strictly, so none is above the last.
    assert scheme.ladder(317).rungs[-1] == 317


def test_B2_doubling_to_a_limit_that_is_no_power_of_two() -> None:
    ladder = powers_of_two().ladder(16640)
    assert ladder.rungs[-2:] == (16384, 16640)
    assert ladder.rung_for(16385) == 16640
    assert ladder.rung_for(16640) == 16640


def test_the_schemes_make_the_ladders_they_are_named_for() -> None:
    assert exact().ladder(4).rungs == (1, 2, 3, 4)
    assert single().ladder(9).rungs == (9,)
    assert linear(100).ladder(317).rungs == (100, 200, 300, 317)
    assert powers_of_two().ladder(317).rungs == (1, 2, 4, 8, 16, 32, 64, 128, 256, 317)
    assert powers_of_two(20).ladder(128).rungs == (32, 64, 128)
    assert geometric(2, 1, 5).ladder(30).rungs == (5, 10, 20, 30)
    assert geometric(1.5, 16).ladder(100).rungs == (16, 32, 48, 80, 100)
    assert bounded_waste(25).ladder(16).rungs == (1, 2, 3, 5, 8, 11, 16)
    assert explicit([64, 128, 256]).ladder(200).rungs == (64, 128, 200)
    assert powers_of_two(512).ladder(100).rungs == (100,)


@given(st.floats(1.01, 4), st.integers(1, 64), st.integers(1, 300), st.integers(1, 3000))
def test_geometric_aligns_every_rung_but_the_limit(
    growth: float, align: int, minimum: int, limit: int
) -> None:
    ladder = geometric(growth, align, minimum).ladder(limit)
    assert all(rung % align == 0 and rung >= minimum for rung in ladder.rungs[:-1])


@given(st.integers(1, 400), st.integers(1, 99))
def test_bounded_waste_uses_the_fewest_rungs(limit: int, percent: int) -> None:
    ladder = bounded_waste(percent).ladder(limit)
    for place in range(1, len(ladder) - 1):
        fewer = Ladder(ladder.rungs[:place] + ladder.rungs[place + 1 :])
        assert fewer.worst_padding()[0] > percent / 100


@pytest.mark.parametrize("scheme", RULES[:-1], ids=lambda scheme: scheme.name)
def test_a_scheme_is_its_name(scheme: Scheme) -> None:
    again = parse_scheme(scheme.name)
    assert again == scheme
    assert hash(again) == hash(scheme)
    assert again.ladder(777) == scheme.ladder(777)
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert isinstance(scheme, Scheme)


def test_parameters_may_be_named() -> None:
    assert parse_scheme("geometric:1.5,minimum=8") == geometric(1.5, 1, 8)
    assert parse_scheme(" powers-of-two : 8 ") == powers_of_two(8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fibonacci", "one of exact, single"),
        ("linear", "linear needs step"),
        ("linear:x", "a whole number; got 'x'"),
        ("linear:0", "at least 1; got 0"),
        ("linear:1.5", "a whole number"),
        ("single:3", "takes no parameters"),
        ("powers_of_two:8,9", "takes minimum"),
        ("powers_of_two:8,minimum=9", "takes minimum"),
        ("geometric:1", "above 1; got 1"),
        ("geometric:nan", "above 1"),
        ("bounded_waste:100", "below 100"),
        ("fitted:8", "needs observed sizes"),
        ("explicit:", "at least one rung"),
        ("explicit:8,4", "rise strictly"),
    ],
)
def test_a_bad_text_says_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_scheme(text)


@pytest.mark.parametrize("limit", [0, -3, 1.5, True])
def test_a_limit_is_a_whole_number_from_one(limit: int) -> None:
    with pytest.raises(SchemeError, match="limit must be an integer of at least 1"):
        exact().ladder(limit)


def test_fitted_keeps_what_it_saw_and_refuses_what_is_beyond() -> None:
    counts = {10: 5.0, 100: 1.0}
    scheme = fitted(counts, 2)
    counts[50] = 1e9
    assert scheme.name == "fitted:2"
    assert scheme.ladder(100).rungs == (10, 100)
    with pytest.raises(FitError, match=r"limit of 64; got 100.*overflow"):
        scheme.ladder(64)


def test_a_scheme_may_be_an_object_a_name_or_a_list() -> None:
    for chosen in (explicit([8, 16]), "explicit:8,16", [8, 16], (8, 16)):
        assert as_scheme(chosen).ladder(40).rungs == (8, 16, 40)
    with pytest.raises(SchemeError, match="got 3"):
        as_scheme(3)  # type: ignore[arg-type]
