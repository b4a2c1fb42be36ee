import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import DriftDetector, Histogram, TraceError, fit_ladder, report

arrivals = st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 50)), max_size=40)


@given(arrivals, st.floats(0.5, 1000))
def test_counts_halve_with_every_half_life(events, half_life: float) -> None:
    events = sorted(events)
    histogram = Histogram(half_life)
    for now, size in events:
        histogram.add(size, now)
    end = events[-1][0] if events else 0.0
    sizes, counts = histogram.arrays(end)
    found = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    for size in {size for _, size in events}:
        exact = sum(2 ** ((now - end) / half_life) for now, one in events if one == size)
        assert found.get(size, 0.0) == pytest.approx(exact, rel=1e-9, abs=1e-9)


@given(arrivals, arrivals)
def test_merged_replicas_count_like_one(one, other) -> None:
    parts = []
    for events in (one, other):
        part = Histogram(100.0)
        for now, size in sorted(events):
            part.add(size, now)
        parts.append(part)
    whole = Histogram(100.0)
    for now, size in sorted(one + other):
        whole.add(size, now)
    merged = parts[0].merge(parts[1])
    expected = dict(zip(*(array.tolist() for array in whole.arrays()), strict=True))
    found = dict(zip(*(array.tolist() for array in merged.arrays()), strict=True))
    for size in expected.keys() | found.keys():
        assert found.get(size, 0.0) == pytest.approx(expected.get(size, 0.0), rel=1e-6, abs=1e-9)


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(0, 100))
def test_a_percentile_is_the_smallest_size_that_holds_that_share(sizes: list[int], percent: int) -> None:
    expected = int(np.percentile(sizes, percent, method="inverted_cdf"))
    assert Histogram.of(sizes).percentile(percent) == expected


def test_saving_and_loading_keeps_everything() -> None:
    histogram = Histogram(60.0)
    for now, size in enumerate([5, 9, 9, 200]):
        histogram.add(size, float(now))
    again = Histogram.from_dict(json.loads(json.dumps(histogram.to_dict())))
    assert again.arrays()[0].tolist() == histogram.arrays()[0].tolist()
    assert np.allclose(again.arrays()[1], histogram.arrays()[1])
    moved = Histogram.from_dict(histogram.to_dict(), now_s=1e6)
    assert moved.total(1e6) == pytest.approx(histogram.total())
    empty = Histogram.from_dict(json.loads(json.dumps(Histogram().to_dict())))
    assert empty.total() == 0


def test_memory_is_that_of_recent_traffic() -> None:
    histogram = Histogram(1.0)
    for now in range(5000):
        histogram.add(now, float(now))
    assert len(histogram.arrays()[0]) < 200
    assert histogram.total() == pytest.approx(2.0)


def test_a_clock_that_steps_back_changes_nothing() -> None:
    histogram = Histogram(1.0)
    histogram.add(5, 100.0)
    histogram.add(5, 50.0)
    assert histogram.total() == pytest.approx(2.0)


def test_a_mean_weighs_by_counts() -> None:
    assert Histogram.of([1, 1, 4]).mean() == 2.0


@pytest.mark.parametrize(
    ("size", "now", "count", "message"),
    [
        (-1, 0.0, 1.0, "at least 0; got -1"),
        (1.5, 0.0, 1.0, "integer"),
        (True, 0.0, 1.0, "integer"),
        (1, float("nan"), 1.0, "finite number of seconds"),
        (1, 0.0, float("nan"), "count is a finite number"),
        (1, 0.0, -1.0, "count is a finite number"),
    ],
)
def test_only_sizes_counts_and_times_are_counted(size, now: float, count: float, message: str) -> None:
    histogram = Histogram(5.0)
    with pytest.raises(TraceError, match=message):
        histogram.add(size, now, count)
    assert histogram.total() == 0


def test_an_empty_histogram_has_no_percentiles() -> None:
    for ask in (lambda: Histogram().percentile(50), lambda: Histogram().mean()):
        with pytest.raises(TraceError, match="Nothing was counted"):
            ask()
    with pytest.raises(TraceError, match="0 to 100"):
        Histogram.of([1]).percentile(101)
    with pytest.raises(TraceError, match="half-life"):
        Histogram(0)
    with pytest.raises(TraceError, match="one half-life"):
        Histogram(1).merge(Histogram(2))
    with pytest.raises(TraceError, match="to_dict"):
        Histogram.from_dict({"sizes": [1]})


def test_drift_is_said_once_until_it_has_cleared() -> None:
    detector = DriftDetector(raise_at=0.3, clear_at=0.2, hold_s=10)
    wastes = [0.1, 0.35, 0.35, 0.35, 0.4, 0.25, 0.4, 0.15, 0.4, 0.4, 0.4]
    said = [detector.update(waste, 5.0 * tick) for tick, waste in enumerate(wastes)]
    assert said == [False, False, False, True, False, False, False, False, False, False, True]
    detector.rearm()
    assert not detector.drifted


def test_a_short_spell_of_waste_is_no_drift() -> None:
    detector = DriftDetector(0.3, 0.2, hold_s=10)
    assert not any(detector.update(0.5 if tick % 2 else 0.1, 6.0 * tick) for tick in range(20))


@pytest.mark.parametrize("args", [(0.2, 0.3), (1.0, 0.1), (0.3, -0.1), (0.3, 0.2, -1), (float("nan"), 0.1)])
def test_thresholds_are_in_order(args: tuple[float, ...]) -> None:
    with pytest.raises(TraceError, match="clear_at <= raise_at"):
        DriftDetector(*args)


def test_a_waste_is_a_number() -> None:
    with pytest.raises(TraceError, match="NaN"):
        DriftDetector(0.3, 0.2).update(float("nan"), 0.0)


def test_traffic_that_moves_raises_drift_and_a_new_fit_clears_it() -> None:
    rng = np.random.default_rng(0)
    histogram = Histogram(half_life_s=50)
    ladder = fit_ladder(rng.integers(1, 50, 500), 6, limit=512)
    detector = DriftDetector(raise_at=0.3, clear_at=0.2, hold_s=5)
    refits = 0
    for now in range(600):
        long = now >= 300
        histogram.add(int(rng.integers(200, 400) if long else rng.integers(1, 50)), float(now))
        if detector.update(report(ladder, histogram).waste, float(now)):
            ladder = fit_ladder(histogram, 6, limit=512)
            detector.rearm()
            refits += 1
    assert 1 <= refits <= 3
    assert report(ladder, histogram).waste < 0.25
