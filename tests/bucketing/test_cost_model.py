import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, CostError, CostModel, Grid, Planner, elements_prior

AXES = ("batch", "length")
GRID = Grid.explicit(AXES, [(b, n) for b in (1, 2, 4, 8) for n in (16, 64, 256)])
seconds = st.floats(1e-6, 10)


def bucket(text: str) -> Bucket:
    return Bucket.parse(text, AXES)


@given(
    st.dictionaries(st.sampled_from(GRID.buckets), seconds),
    st.dictionaries(st.sampled_from(GRID.buckets), st.floats(1e3, 1e12)),
)
def test_a_larger_bucket_is_never_cheaper_than_one_inside(
    measured: dict[Bucket, float], flops: dict[Bucket, float]
) -> None:
    model = CostModel()
    for one, work in flops.items():
        model.set_prior(one, flops=work)
    for one, value in measured.items():
        model.observe(one, value)
    table = dict(zip(GRID.buckets, model.table(GRID).tolist(), strict=True))
    for small in GRID:
        assert table[small] <= model.seconds(small) * (1 + 1e-9)
        for large in GRID:
            assert not large.contains(small) or table[large] >= table[small]
            assert not large.contains(small) or model.seconds(large) >= model.seconds(small)
    for _ in range(2):
        for one, value in measured.items():
            model.observe(one, value)
    table = dict(zip(GRID.buckets, model.table(GRID).tolist(), strict=True))
    assert table == pytest.approx({one: model.seconds(one) for one in GRID})


def test_unmeasured_buckets_follow_the_measured_ratio() -> None:
    model = CostModel(lambda bucket: float(bucket.elements))
    model.observe(bucket("1x64"), 0.64)
    model.observe(bucket("8x64"), 5.12)
    assert model.seconds(bucket("4x64")) == pytest.approx(2.56)
    assert model.seconds(bucket("8x256")) == pytest.approx(20.48)


def test_a_measurement_replaces_the_prior_and_bounds_its_neighbours() -> None:
    model = CostModel(lambda bucket: float(bucket.elements))
    model.observe(bucket("1x64"), 1.0)
    model.observe(bucket("4x64"), 1.5)
    assert model.seconds(bucket("4x64")) == 1.5
    assert 1.0 <= model.seconds(bucket("2x64")) <= 1.5


def test_a_small_bucket_that_seems_dearer_than_a_larger_one_is_taken_for_spoilt() -> None:
    model = CostModel(lambda bucket: float(bucket.elements))
    for one, value in (("1x16", 0.01), ("2x16", 0.5), ("4x16", 0.04)):
        model.observe(bucket(one), value)
    assert [model.seconds(bucket(one)) for one in ("1x16", "2x16", "4x16")] == [0.01, 0.04, 0.04]
    assert model.measured()[bucket("2x16")] == 0.5


def test_a_bucket_that_was_hardly_tried_is_hoped_to_be_cheaper() -> None:
    model = CostModel(lambda bucket: float(bucket.elements))
    grid = Grid.explicit(AXES, [(8, 16), (16, 16)])
    for _ in range(3):
        model.observe(bucket("8x16"), 0.128)
    model.observe(bucket("16x16"), 0.300)  # its first run was slow; 0.256 would be right
    assert model.hopes(bucket("16x16"))
    assert not model.hopes(bucket("8x16"))
    planner = Planner(grid, model)
    honest = Planner(grid, model.seconds)
    assert {run.bucket.rows for run in honest.plan([[16]] * 16)} == {8}
    # So it is run, and what it really takes becomes known.
    for _ in range(2):
        assert [run.bucket.rows for run in planner.plan([[16]] * 16)] == [16]
        model.observe(bucket("16x16"), 0.250)
    assert not model.hopes(bucket("16x16"))
    assert model.table(grid).tolist() == [model.seconds(one) for one in grid]
    assert [run.bucket.rows for run in planner.plan([[16]] * 16)] == [16]


def test_a_first_run_that_was_spoilt_many_times_over_is_found_out() -> None:
    model = CostModel(lambda bucket: float(bucket.elements))
    for one in ("1x16", "2x16", "4x16", "8x16"):
        for _ in range(3):
            model.observe(bucket(one), 0.001 * bucket(one).elements)
    model.observe(bucket("16x16"), 10.0)
    grid = Grid.explicit(AXES, [(8, 16), (16, 16)])
    assert model.table(grid).tolist() == pytest.approx([0.128, 0.256])
    assert model.seconds(bucket("16x16")) == 10.0


@given(st.lists(st.floats(0.5, 20.0), min_size=len(GRID.buckets), max_size=len(GRID.buckets)))
def test_a_wrong_hope_costs_each_bucket_two_runs(truth: list[float]) -> None:
    """Whatever the buckets really take, plans settle on what an honest planner would do."""
    order = sorted(truth)
    real = dict(zip(sorted(GRID, key=lambda one: (one.elements, one)), order, strict=True))
    model = CostModel()
    for one, value in real.items():
        model.observe(one, value)
    planner, hoped = Planner(GRID, model), 0
    for _ in range(3 * len(GRID)):
        run = planner.next_run([[200], [40], [10], [10], [10], [60], [10], [16], [1], [250]])
        hoped += model.hopes(run.bucket)
        model.observe(run.bucket, real[run.bucket])
    assert hoped <= 2 * len(GRID)


@pytest.mark.parametrize("seed", range(3))
def test_first_timings_that_are_too_long_cost_a_full_queue_little(seed: int) -> None:
    """As on a CPU: whatever takes long was timed once, 10 to 30 % too high, and costs are nearly linear."""
    rng = np.random.default_rng(seed)
    grid = Grid.explicit(AXES, [(b, n) for b in (1, 2, 4, 8, 16) for n in (16, 32, 64, 128)])
    lengths = [(int(n),) for n in rng.integers(4, 129, 500)]

    def real(one: Bucket) -> float:
        return 0.0015 + one.elements / 7300 * (1.1 if one.rows == 1 else 1.0)

    def drain(planner: Planner, model: CostModel) -> float:
        left, total = list(lengths), 0.0
        while left:
            run = planner.next_run(left[:256])
            model.observe(run.bucket, real(run.bucket) * math.exp(0.03 * abs(rng.normal())))
            total += real(run.bucket)
            taken = set(run.rows)
            left = [size for place, size in enumerate(left) if place not in taken]
        return total

    model = CostModel()
    for one in grid:
        model.observe(one, real(one) * (rng.uniform(1.1, 1.3) if real(one) > 0.05 else 1.0))
    assert drain(Planner(grid, model), model) < 1.03 * drain(Planner(grid, real), CostModel())


def test_flops_and_bytes_make_a_roofline() -> None:
    model = CostModel(flops_per_s=100.0, bytes_per_s=10.0, overhead_s=1.0)
    model.set_prior(bucket("1x64"), flops=200.0, bytes=10.0)
    model.set_prior(bucket("8x64"), flops=200.0, bytes=40.0)
    assert model.seconds(bucket("1x64")) == 3.0
    assert model.seconds(bucket("8x64")) == 5.0
    assert 3.0 <= model.seconds(bucket("2x64")) <= 5.0


def test_one_outlier_hardly_moves_a_settled_estimate() -> None:
    model = CostModel()
    one = bucket("1x64")
    for _ in range(50):
        model.observe(one, 0.010)
    model.observe(one, 10.0)
    assert model.seconds(one) == pytest.approx(0.010, rel=0.06)


def test_a_slow_first_run_is_forgotten() -> None:
    model = CostModel()
    one = bucket("1x64")
    for value in (5.0, 0.01, 0.01, 0.01, 0.01, 0.01):
        model.observe(one, value)
    assert model.seconds(one) == pytest.approx(0.01, rel=0.3)


def test_a_lasting_change_is_followed() -> None:
    model = CostModel()
    one = bucket("1x64")
    for value in [0.01] * 100 + [0.10] * 20:
        model.observe(one, value)
    assert model.seconds(one) == pytest.approx(0.10, rel=0.1)


def test_the_table_is_kept_until_something_was_learned() -> None:
    model = CostModel()
    model.observe(bucket("1x64"), 0.01)
    table, version = model.table(GRID), model.version
    model.observe(bucket("1x64"), 0.0101)
    assert model.table(GRID) is table
    assert model.version == version
    for _ in range(5):
        model.observe(bucket("1x64"), 0.02)
    assert model.version > version
    assert model.table(GRID) is not table
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_a_time_that_is_none_is_refused_and_nothing_learned(value: float) -> None:
    model = CostModel()
    with pytest.raises(CostError, match=r"at least 0; got measured .* for bucket 1x64"):
        model.observe(bucket("1x64"), value)
    assert model.measured() == {}
    with pytest.raises(CostError, match="got flops"):
        model.set_prior(bucket("1x64"), flops=value)
    with pytest.raises(CostError, match="got prior"):
        CostModel(lambda bucket: value).seconds(bucket("1x64"))


def test_a_prior_needs_some_work_and_the_same_axes() -> None:
    model = CostModel()
    with pytest.raises(CostError, match="neither"):
        model.set_prior(bucket("1x64"))
    model.observe(bucket("1x64"), 1.0)
    with pytest.raises(CostError, match="same axes"):
        model.seconds(Bucket(("batch",), (1,)))


def test_a_clock_too_coarse_to_see_the_run_counts_as_fast() -> None:
    model = CostModel()
    model.observe(bucket("1x16"), 0.0)
    assert 0 < model.seconds(bucket("1x16")) < 1e-6


def test_before_anything_is_known_the_elements_decide() -> None:
    assert np.allclose(CostModel().table(GRID), [elements_prior(one) for one in GRID])
