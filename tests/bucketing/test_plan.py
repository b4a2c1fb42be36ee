"""Plans of waiting rows, worked out by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from servax.bucketing import (
    Bucket,
    CostError,
    CostModel,
    DoesNotFit,
    Grid,
    Lateness,
    PlanError,
    Planner,
    Run,
    elements_prior,
    plan,
    powers_of_two,
)

TEXT = ("batch", "length")

IMAGE = ("batch", "height", "width")


def named(runs: list[Run]) -> list[tuple[str, int]]:
    return [(str(run.bucket), len(run.rows)) for run in runs]


def power_grid(rows: int, length: int) -> Grid:
    return Grid.product({"batch": powers_of_two().ladder(rows), "length": powers_of_two(16).ladder(length)})


def test_B4_the_choice_is_the_lowest_cost_over_buckets_and_splits() -> None:
    grid = Grid.explicit(TEXT, [(1, 4096), (4, 2048), (8, 128), (8, 512)])
    assert named(plan([[100]] * 3, grid, CostModel())) == [("8x128", 3)]

    model = CostModel()
    model.observe(Bucket(TEXT, (16, 256)), 0.372)
    model.observe(Bucket(TEXT, (8, 256)), 0.104)
    grid = Grid.explicit(TEXT, [(8, 256), (16, 256)])
    assert named(plan([[256]] * 16, grid, model)) == [("8x256", 8), ("8x256", 8)]


def test_B5_a_row_exactly_at_a_rung_uses_it() -> None:
    grid = Grid.explicit(TEXT, [(1, 64), (1, 128), (1, 256)])
    runs = plan([[64], [65], [128], [129], [256]], grid, CostModel())
    assert [run.bucket["length"] for run in runs] == [64, 128, 128, 256, 256]


def test_B6_more_rows_than_the_largest_batch_are_split_and_longer_ones_refused() -> None:
    grid = power_grid(8, 128)
    assert named(plan([[128]] * 9, grid, CostModel())) == [("8x128", 8), ("1x128", 1)]
    with pytest.raises(DoesNotFit, match="row 1 of size 129 fits none, the nearest is 1x128"):
        plan([[5], [129]], grid, CostModel())


def test_B7_no_run_exceeds_the_largest_batch() -> None:
    runs = plan([[64]] * 15, power_grid(8, 128), CostModel())
    assert [len(run.rows) for run in runs] == [8, 7]


def test_B8_seventeen_rows_run_in_order() -> None:
    runs = plan([[64]] * 17, power_grid(8, 64), CostModel())
    assert [run.rows for run in runs] == [tuple(range(8)), tuple(range(8, 16)), (16,)]


def test_B12_one_row_runs_in_a_one_row_bucket() -> None:
    planner = Planner(power_grid(32, 512), CostModel())
    assert planner.next_run([(40,)]) == Run(Bucket(TEXT, (1, 64)), (0,))
    flat = Planner(power_grid(32, 512), lambda bucket: 1.0)
    assert flat.next_run(np.array([[40]])).bucket.rows == 1


def test_Q6_a_row_is_passed_over_at_most_as_often_as_there_were_rows_before_it() -> None:
    planner = Planner(power_grid(8, 512), CostModel())
    waiting = [(10,)] * 3 + [(500,)] + [(10,)] * 40
    for _ in range(4):
        run = planner.next_run(waiting)
        assert run.rows[0] == 0
        if any(waiting[row] == (500,) for row in run.rows):
            return
        waiting = [size for row, size in enumerate(waiting) if row not in run.rows] + [(10,)] * 8
    pytest.fail("the long row still waits after 4 launches")


def test_Q6_equal_rows_are_launched_in_order_of_arrival() -> None:
    planner = Planner(power_grid(8, 64), CostModel(), window=20)
    waiting = list(range(100))
    launched: list[int] = []
    while waiting:
        run = planner.next_run([(30,)] * len(waiting))
        launched += [waiting[row] for row in run.rows]
        waiting = [one for row, one in enumerate(waiting) if row not in run.rows]
    assert launched == list(range(100))


def test_Q7_alternating_lengths_are_grouped() -> None:
    runs = plan([[10], [500]] * 16, power_grid(8, 512), CostModel())
    assert sorted(named(runs)) == [("8x16", 8)] * 2 + [("8x512", 8)] * 2


def test_Q7_short_rows_do_not_run_long_unless_the_cost_says_so() -> None:
    sizes = [[10]] * 7 + [[500]]
    grid = power_grid(8, 512)
    assert all(run.bucket["length"] == 16 for run in plan(sizes, grid, CostModel()) if len(run.rows) > 1)
    together = plan(sizes, grid, lambda bucket: 1.0)
    assert named(together) == [("8x512", 8)]


def test_five_rows_run_as_whichever_is_cheapest() -> None:
    grid = power_grid(8, 64)

    def seconds(call: float) -> Callable[[Bucket], float]:
        return lambda bucket: call + bucket.elements

    assert named(plan([[64]] * 5, grid, seconds(0))) == [("4x64", 4), ("1x64", 1)]
    assert named(plan([[64]] * 5, grid, seconds(1000))) == [("8x64", 5)]


def test_an_urgent_row_does_not_wait_for_long_ones() -> None:
    grid = power_grid(8, 512)
    sizes = [[16]] + [[500]] * 7
    cost = elements_prior
    urgent = Lateness([0.0002] + [10.0] * 7, price=100.0)
    patient = plan(sizes, grid, lambda bucket: 1.0)
    assert named(patient) == [("8x512", 8)]
    assert plan(sizes, grid, cost, lateness=urgent)[0] == Run(Bucket(TEXT, (1, 16)), (0,))


@pytest.mark.parametrize("first", [0, 3, 7])
def test_the_next_run_holds_the_row_asked_for(first: int) -> None:
    planner = Planner(power_grid(2, 64), CostModel())
    sizes = [(10,), (60,)] * 4
    run = planner.next_run(sizes, first=first)
    assert first in run.rows
    assert len(run.rows) == len(set(run.rows)) == 2


def test_the_window_bounds_what_is_looked_at() -> None:
    planner = Planner(power_grid(4, 64), CostModel(), window=3)
    assert planner.next_run([(10,)] * 10_000).rows == (0, 1, 2)
    with pytest.raises(PlanError, match="3 rows in the window; got row 3"):
        planner.next_run([(10,)] * 5, first=3)


def test_a_planner_follows_the_cost_model() -> None:
    model = CostModel()
    planner = Planner(power_grid(8, 64), model)
    assert planner.next_run([(64,)] * 8).bucket.rows == 8
    for _ in range(9):
        model.observe(Bucket(TEXT, (4, 64)), 0.001)
        model.observe(Bucket(TEXT, (8, 64)), 0.100)
    assert planner.next_run([(64,)] * 8).bucket.rows == 4


def test_plans_do_not_change_from_call_to_call() -> None:
    sizes = np.random.default_rng(0).integers(1, 513, (300, 1))
    planner = Planner(power_grid(32, 512), CostModel())
    assert planner.plan(sizes) == planner.plan(sizes) == plan(sizes, power_grid(32, 512), CostModel())


def test_a_windowed_queue_costs_little_more_than_the_whole_plan() -> None:
    sizes = [tuple(size) for size in np.random.default_rng(1).integers(1, 513, (3000, 1)).tolist()]
    planner = Planner(power_grid(32, 512), elements_prior)
    whole = sum(elements_prior(run.bucket) for run in planner.plan(sizes))
    spent = 0.0
    while sizes:
        run = planner.next_run(sizes)
        gone = set(run.rows)
        spent += elements_prior(run.bucket)
        sizes = [size for row, size in enumerate(sizes) if row not in gone]
    assert spent <= 1.02 * whole


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[1.5]], "integers of shape"),
        ([1, 2], "integers of shape"),
        ([[-1]], "at least 0; got -1"),
        ([[1, 2]], "one integer for each of the axes"),
    ],
)
def test_bad_waiting_lists_are_refused(sizes: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(sizes, power_grid(2, 16), CostModel())


def test_nothing_waits() -> None:
    planner = Planner(power_grid(2, 16), CostModel())
    assert plan([], power_grid(2, 16), CostModel()) == planner.plan([]) == []
    with pytest.raises(PlanError, match="0 rows in the window"):
        planner.next_run([])
    with pytest.raises(PlanError, match="at least 1 row; got 0"):
        Planner(power_grid(2, 16), CostModel(), window=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(CostError, match=r"finite costs of at least 0; got .* for bucket 1x16"):
        plan([[1]], power_grid(2, 16), lambda bucket: value)


def test_a_slack_is_needed_for_each_row() -> None:
    grid = power_grid(2, 16)
    with pytest.raises(PlanError, match="Each of the 2 rows needs a slack; got 1"):
        plan([[1], [2]], grid, CostModel(), lateness=Lateness([1.0]))
    with pytest.raises(PlanError, match="got NaN"):
        plan([[1], [2]], grid, CostModel(), lateness=Lateness([1.0, float("nan")]))


def test_a_hole_in_a_grid_of_several_axes_is_refused_by_shape() -> None:
    grid = Grid.explicit(IMAGE, [(1, 2, 4), (1, 4, 2)])
    with pytest.raises(DoesNotFit, match="size 4x4 fits none"):
        plan([[4, 4], [1, 1]], grid, CostModel())
    assert len(plan([[4, 1], [1, 4]], grid, CostModel())) == 2
