import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import FitError, Ladder, TraceError, choose_programs, report


def bill(ladder: Ladder, counts: dict[int, int], horizon: float) -> float:
    run = sum(count * ladder.rung_for(size) for size, count in counts.items())
    return horizon * run + sum(10 + rung for rung in ladder)


@settings(max_examples=40)
@given(
    st.dictionaries(st.integers(1, 20), st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.integers(0, 3),
)
def test_a_program_is_taken_only_if_it_saves_more_than_it_costs(counts, horizon: float, above: int) -> None:
    limit = max(counts) + above
    found = choose_programs(
        counts,
        seconds=float,
        compile_seconds=lambda rung: 10.0 + rung,
        horizon=horizon,
        limit=limit,
    )
    below = [size for size in counts if size < limit]
    ladders = [
        Ladder((*sorted(rungs), limit))
        for several in range(len(below) + 1)
        for rungs in itertools.combinations(below, several)
    ]
    assert bill(found.ladder, counts, horizon) == pytest.approx(
        min(bill(ladder, counts, horizon) for ladder in ladders)
    )
    assert found.run_s + found.compile_s == pytest.approx(bill(found.ladder, counts, horizon))
    assert found.waste == pytest.approx(report(found.ladder, counts).waste)


def test_B10_a_limit_of_262144_within_60_compile_seconds() -> None:
    sizes = np.minimum(np.random.default_rng(0).geometric(1 / 2000, 20_000), 262_144)
    found = choose_programs(
        sizes,
        seconds=lambda rung: rung * 1e-4,
        compile_seconds=lambda rung: 1 + rung * 1e-4,
        horizon=100,
        budget_seconds=60,
        limit=262_144,
    )
    assert found.compile_s <= 60
    assert found.compile_s == pytest.approx(sum(1 + rung * 1e-4 for rung in found.ladder))
    assert found.ladder.limit == 262_144
    assert found.ladder.rungs_for(sizes).shape == sizes.shape
    assert found.waste < 0.10
    assert found.next_saving_s > 0


def test_longer_horizons_pay_for_more_programs() -> None:
    sizes = np.random.default_rng(0).integers(1, 500, 1000)
    lengths = [
        len(
            choose_programs(
                sizes, seconds=lambda rung: rung * 1e-4, compile_seconds=lambda rung: 1.0, horizon=horizon
            ).ladder
        )
        for horizon in (0.01, 1, 100)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1 < lengths[-1]


def test_memory_is_a_price_and_a_budget() -> None:
    sizes = list(range(1, 101))
    common = {"seconds": float, "compile_seconds": lambda rung: 0.0, "program_bytes": lambda rung: 1e6}
    assert len(choose_programs(sizes, **common, max_programs=10).ladder) == 10
    assert len(choose_programs(sizes, **common, budget_bytes=3.5e6).ladder) == 3
    assert choose_programs(sizes, **common, budget_bytes=3.5e6).bytes == 3e6
    assert len(choose_programs(sizes, **common, seconds_per_byte=1.0).ladder) == 1


def test_one_more_program_than_sizes_saves_nothing() -> None:
    found = choose_programs([5, 5], seconds=float, compile_seconds=lambda rung: 0.1)
    assert found.ladder.rungs == (5,)
    assert found.next_saving_s == 0


def test_budgets_that_nothing_meets_are_refused() -> None:
    common = {"seconds": float, "compile_seconds": lambda rung: 5.0}
    with pytest.raises(FitError, match="limit 9 needs a program, and that one alone exceeds"):
        choose_programs([3, 9], **common, budget_seconds=4)
    with pytest.raises(FitError, match="Budgets are above 0"):
        choose_programs([3, 9], **common, budget_seconds=0)
    with pytest.raises(FitError, match="horizon is a finite number above 0; got nan"):
        choose_programs([3, 9], **common, horizon=float("nan"))
    with pytest.raises(TraceError, match="empty"):
        choose_programs([], **common)
