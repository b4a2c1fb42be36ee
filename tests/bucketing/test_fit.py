import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import (
    FitError,
    Histogram,
    Ladder,
    TraceError,
    bounded_waste,
    fit_curve,
    fit_ladder,
    geometric,
    linear,
    observed,
    powers_of_two,
    report,
)

traces = st.dictionaries(st.integers(0, 24), st.integers(1, 9), min_size=1, max_size=12)


def cost_of(ladder: Ladder, counts: dict[int, int], cost=lambda rung: rung) -> float:
    return sum(count * cost(ladder.rung_for(size)) for size, count in counts.items())


def brute_force(
    counts: dict[int, int], limit: int, programs: int, align: int, minimum: int, cost, price
) -> float:
    allowed = [rung for rung in range(1, limit) if rung % align == 0 and rung >= minimum]
    best = float("inf")
    for several in range(programs):
        for rungs in itertools.combinations(allowed, several):
            ladder = Ladder((*rungs, limit))
            best = min(best, cost_of(ladder, counts, cost) + sum(map(price, ladder)))
    return best


@settings(max_examples=60)
@given(
    traces,
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([lambda rung: rung, lambda rung: 3 + rung**1.5, lambda rung: rung // 7, lambda rung: 0]),
    st.sampled_from([lambda rung: 0, lambda rung: 20 + rung]),
)
def test_B10_the_dynamic_program_equals_brute_force(
    counts, above, programs, align, minimum, cost, price
) -> None:
    limit = max(1, max(counts) + above)
    fits = fit_curve(counts, programs, limit=limit, align=align, minimum=minimum, cost=cost, price=price)
    best = min(fit.cost + fit.price for fit in fits)
    assert best == pytest.approx(brute_force(counts, limit, programs, align, minimum, cost, price))
    for place, fit in enumerate(fits, 1):
        assert len(fit.ladder) == place
        assert fit.ladder.limit == limit
        assert fit.cost == pytest.approx(cost_of(fit.ladder, counts, cost))
        assert fit.waste == pytest.approx(report(fit.ladder, counts).waste)
        assert all(rung % align == 0 and rung >= minimum for rung in fit.ladder.rungs[:-1])


@given(
    st.dictionaries(st.integers(1, 900), st.integers(1, 99), min_size=1, max_size=80),
    st.sampled_from([powers_of_two(), powers_of_two(16), linear(64), geometric(1.4, 8), bounded_waste(30)]),
    st.integers(0, 200),
)
def test_no_other_scheme_of_as_many_programs_wastes_less(counts, scheme, above: int) -> None:
    limit = max(counts) + above
    other = scheme.ladder(limit)
    ours = fit_ladder(counts, len(other), limit=limit)
    assert len(ours) <= len(other)
    assert report(ours, counts).waste <= report(other, counts).waste + 1e-12


@given(traces)
def test_each_program_more_saves_less_than_the_one_before(counts) -> None:
    costs = [fit.cost for fit in fit_curve(counts, 99)]
    savings = -np.diff(costs)
    assert (savings >= 0).all()
    assert (np.diff(savings) <= 1e-9).all()


def test_sixteen_thousand_sizes_and_32_programs_fit_in_a_second() -> None:
    counts = np.random.default_rng(0).integers(1, 1000, 16_384)
    trace = dict(enumerate(counts.tolist(), 1))
    took_s = []
    for _ in range(3):  # the best of them: others may need the machine too
        start_s = time.perf_counter()
        ladder = fit_ladder(trace, 32)
        took_s.append(time.perf_counter() - start_s)
    assert min(took_s) < 1
    assert len(ladder) == 32
    assert ladder.limit == 16_384


def test_B10_a_limit_far_above_the_traffic_is_a_rung() -> None:
    ladder = fit_ladder([3, 5, 9], 3, limit=262_144)
    assert ladder.rungs == (5, 9, 262_144)


def test_observations_come_in_any_form() -> None:
    histogram = Histogram.of([3, 3, 5, 0])
    for trace in (
        histogram,
        {3: 2, 5: 1, 0: 1},
        [3, 3, 5, 0],
        np.array([0, 3, 3, 5]),
        np.array([3.0, 3, 5, 0]),
    ):
        sizes, counts = observed(trace)
        assert sizes.tolist() == [0, 3, 5]
        assert counts.tolist() == [1, 2, 1]


def test_obvious_answers() -> None:
    assert fit_ladder([7] * 100, 5).rungs == (7,), "one single length"
    assert fit_ladder([3, 5], 99).rungs == (3, 5), "more programs than distinct sizes"
    assert fit_ladder([0, 0], 4).rungs == (1,), "only zeros"
    assert fit_ladder([0, 4], 4).rungs == (1, 4)
    assert fit_ladder({3: 1, 900: 0}, 4).rungs == (3,), "sizes that were never counted"
    assert fit_ladder([3, 5], 1).rungs == (5,)
    assert fit_ladder([3, 50], 9, align=16).rungs == (16, 64)
    assert fit_ladder([3, 50], 9, align=16, limit=50).rungs == (16, 50)
    assert fit_ladder([3, 50], 9, minimum=100, limit=60).rungs == (60,)


@pytest.mark.parametrize("trace", [[], {}, {5: 0}, Histogram(), np.zeros(0)])
def test_an_empty_trace_is_refused(trace) -> None:
    with pytest.raises(TraceError, match="the trace is empty"):
        fit_ladder(trace, 4)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([-1], "at least 0; got -1"),
        ([1.5], "whole numbers"),
        ([float("nan")], "whole numbers"),
        (["a"], "whole numbers"),
        ([[1]], "shape"),
        ({1: float("nan")}, "Counts are finite"),
        ({1: -1}, "Counts are finite"),
        ({1: float("inf")}, "Counts are finite"),
    ],
)
def test_what_is_no_trace_is_refused(trace, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        fit_ladder(trace, 4)


def test_sizes_beyond_the_limit_are_refused_cut_or_dropped() -> None:
    trace = [10, 20, 300]
    with pytest.raises(FitError, match=r"at most the limit of 100; got 300.*overflow='clip'"):
        fit_ladder(trace, 3, limit=100)
    assert fit_ladder(trace, 3, limit=100, overflow="clip").rungs == (10, 20, 100)
    assert fit_curve(trace, 3, limit=100, overflow="clip")[-1].waste == 0
    assert fit_ladder(trace, 3, limit=100, overflow="drop").rungs == (10, 20, 100)
    with pytest.raises(FitError, match="No observed size is within the limit of 5"):
        fit_ladder(trace, 3, limit=5, overflow="drop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"programs": 0}, "at least 1 program; got 0"),
        ({"align": 0}, "align is at least 1"),
        ({"minimum": 0}, "minimum is at least 1"),
        ({"limit": 0}, "limit is at least 1"),
        ({"cost": lambda rung: float("nan")}, "finite number of at least 0; got nan for rung 3"),
        ({"cost": lambda rung: -1.0}, "got -1.0"),
        ({"cost": lambda rung: -rung + 100.0}, "must not fall as rungs rise; got 97.0 at 3 and 95.0 at 5"),
    ],
)
def test_bad_parameters_are_refused(options, message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit_ladder([3, 5], **{"programs": 2, **options})
