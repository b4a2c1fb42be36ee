import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, CostModel, FitError, TraceError, elements_prior, fit_grid

TEXT = ("batch", "length")
small = st.integers(1, 4)


def seconds(bucket: Bucket) -> float:
    return 3.0 + bucket.elements


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.tuples(small, small), st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from([float("inf"), 30.0]),
)
def test_the_bound_is_below_and_the_grid_near_the_best(shapes, programs: int, budget: float) -> None:
    batches = (1, 2, 4)
    found = fit_grid(
        shapes,
        TEXT,
        seconds,
        programs=programs,
        batch_rungs=batches,
        compile_seconds=lambda bucket: float(bucket.elements),
        budget_seconds=budget,
    )
    top = max(length for _, length in shapes)
    lengths = {length for _, length in shapes}
    buckets = [Bucket(TEXT, one) for one in itertools.product(batches, lengths)]

    def total(chosen: tuple[Bucket, ...]) -> float:
        return sum(
            count * min(-(-rows // b.rows) * seconds(b) for b in chosen if b["length"] >= length)
            for (rows, length), count in shapes.items()
        )

    best = min(
        total(chosen)
        for several in range(1, programs + 1)
        for chosen in itertools.combinations(buckets, several)
        if any(b["length"] == top for b in chosen) and sum(b.elements for b in chosen) <= budget
    )
    assert len(found.grid) <= programs
    assert found.compile_s <= budget
    assert found.seconds == pytest.approx(total(found.grid.buckets))
    assert found.lower_bound_s <= best + 1e-6
    assert best <= found.seconds + 1e-6
    assert found.seconds <= 1.15 * best
    found.grid.check_coverage({"length": top})


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(1, 700), st.integers(1, 12), st.sampled_from([None, 512, 4000]))
def test_every_fitted_grid_covers_its_limits(seed: int, limit: int, programs: int, cap: int | None) -> None:
    rng = np.random.default_rng(seed)
    shapes = {(int(rng.integers(1, 33)), int(rng.integers(0, limit + 1))): 1.0 for _ in range(50)}
    found = fit_grid(
        shapes, TEXT, elements_prior, programs=programs, limits={"length": limit}, max_elements=cap
    )
    found.grid.check_coverage({"length": limit})
    assert found.grid.limits["length"] == limit
    assert len(found.grid) <= programs
    assert -1e-9 <= found.gap <= 1


def test_long_items_get_short_batches() -> None:
    shapes = {(32, 10): 50.0, (2, 500): 50.0}
    found = fit_grid(shapes, TEXT, CostModel(), programs=2)
    assert list(map(str, found.grid)) == ["2x500", "32x10"]
    assert found.waste == pytest.approx(0)
    assert found.gap == pytest.approx(0, abs=1e-6)


def test_a_real_mix_is_near_its_bound() -> None:
    rng = np.random.default_rng(0)
    shapes: dict[tuple[int, ...], float] = {}
    for rows, length in zip(
        rng.integers(1, 33, 500), np.minimum(rng.geometric(1 / 60, 500), 512), strict=True
    ):
        shapes[int(rows), int(length)] = shapes.get((int(rows), int(length)), 0) + 1
    found = fit_grid(shapes, TEXT, elements_prior, programs=8, limits={"length": 512})
    assert found.gap < 0.05


def test_images_have_two_axes_and_fixed_sizes_none() -> None:
    shapes = {(4, 30, 40): 3.0, (1, 60, 20): 1.0}
    found = fit_grid(shapes, ("batch", "height", "width"), elements_prior, programs=3)
    found.grid.check_coverage({"height": 60, "width": 40})
    fixed = fit_grid({(1,): 5.0, (8,): 2.0}, ("batch",), elements_prior, programs=2)
    assert list(map(str, fixed.grid)) == ["1", "8"]


def test_bytes_are_a_budget() -> None:
    shapes = {(rows, length): 1.0 for rows in (1, 2, 4) for length in (8, 16, 32)}
    found = fit_grid(
        shapes, TEXT, elements_prior, programs=9, program_bytes=lambda b: 100.0, budget_bytes=350.0
    )
    assert len(found.grid) == 3
    assert found.bytes == 300


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        ({}, {}, TraceError, "the trace is empty"),
        ({(1, 4): 0.0}, {}, TraceError, "the trace is empty"),
        ({(0, 4): 1.0}, {}, TraceError, r"rows from 1.*got \(0, 4\)"),
        ({(1,): 1.0}, {}, TraceError, r"got \(1,\)"),
        ({(1, 4): float("nan")}, {}, TraceError, "got nan"),
        ({(1, 4): 1.0}, {"programs": 0}, FitError, "at least 1 program"),
        ({(1, 4): 1.0}, {"limits": {"length": 3}}, FitError, r"at most the limits \[3\]; got \[4\]"),
        ({(1, 4): 1.0}, {"limits": {}}, FitError, "Limits are those of the item axes"),
        ({(1, 4): 1.0}, {"cost": lambda b: float("nan")}, FitError, "got nan for bucket 1x4"),
        (
            {(1, 4): 1.0},
            {"compile_seconds": lambda b: 9.0, "budget_seconds": 5.0},
            FitError,
            "alone exceeds a budget",
        ),
    ],
)
def test_bad_input_is_refused(shapes, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        fit_grid(shapes, TEXT, **{"cost": elements_prior, "programs": 2, **options})
