"""Plans against every partition of the rows, and what holds of each: by hypothesis."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid, Ladder, Lateness, Planner, Run, plan, powers_of_two

TEXT = ("batch", "length")

IMAGE = ("batch", "height", "width")


def power_grid(rows: int, length: int) -> Grid:
    return Grid.product({"batch": powers_of_two().ladder(rows), "length": powers_of_two(16).ladder(length)})


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    head, *tail = rows
    for several in range(len(tail) + 1):
        for mates in itertools.combinations(tail, several):
            rest = [row for row in tail if row not in mates]
            for others in partitions(rest):
                yield [[head, *mates], *others]


def cheapest(sizes: list[tuple[int, ...]], grid: Grid, cost: Callable[[Bucket], float]) -> float:
    """The least cost over every partition of the rows, by trying all of them."""

    def run(rows: list[int]) -> float:
        shape = tuple(max(column) for column in zip(*(sizes[row] for row in rows), strict=True))
        return min(map(cost, grid.candidates(len(rows), shape)), default=float("inf"))

    return min(sum(map(run, groups)) for groups in partitions(list(range(len(sizes)))))


small = st.integers(1, 4)

grids = st.sets(st.tuples(small, small), min_size=1, max_size=6)


def priced(seed: int) -> Callable[[Bucket], float]:
    """Costs that are neither monotone nor related to the elements."""
    return lambda bucket: float(hash((seed, *bucket.sizes)) % 1000) / 64


@settings(max_examples=60)
@given(grids, st.lists(st.integers(0, 4), max_size=6), st.integers(0, 99))
def test_a_plan_equals_the_best_of_all_partitions(
    boxes: set[tuple[int, int]], lengths: list[int], seed: int
) -> None:
    grid = Grid.explicit(TEXT, boxes)
    sizes = [(min(length, grid.limits["length"]),) for length in lengths]
    cost = priced(seed)
    runs = plan(np.array(sizes, int).reshape(len(sizes), 1), grid, cost)
    assert sum(cost(run.bucket) for run in runs) == pytest.approx(cheapest(sizes, grid, cost))


@given(st.sets(small, min_size=1), st.integers(0, 7), st.integers(0, 99))
def test_a_plan_without_item_axes_is_the_best_too(batches: set[int], rows: int, seed: int) -> None:
    grid = Grid.product({"batch": Ladder(tuple(sorted(batches)))})
    cost = priced(seed)
    runs = plan(np.zeros((rows, 0), int), grid, cost)
    assert sum(cost(run.bucket) for run in runs) == pytest.approx(cheapest([()] * rows, grid, cost))


def check_runs(runs: list[Run], sizes: list[tuple[int, ...]]) -> None:
    assert sorted(row for run in runs for row in run.rows) == list(range(len(sizes)))
    assert [run.rows[0] for run in runs] == sorted(run.rows[0] for run in runs)
    for run in runs:
        assert list(run.rows) == sorted(run.rows)
        shape = tuple(max(column) for column in zip(*(sizes[row] for row in run.rows), strict=True))
        assert run.bucket.holds(len(run.rows), shape)
    for size in set(sizes):
        launched = [row for run in runs for row in run.rows if sizes[row] == size]
        assert launched == sorted(launched), "rows of one size are never overtaken"


@given(grids, st.lists(st.integers(1, 4), max_size=60), st.integers(0, 99))
def test_no_row_is_lost_doubled_or_overtaken(
    boxes: set[tuple[int, int]], lengths: list[int], seed: int
) -> None:
    grid = Grid.explicit(TEXT, boxes)
    sizes = [(min(length, grid.limits["length"]),) for length in lengths]
    planner = Planner(grid, priced(seed), window=100)
    runs = planner.plan(sizes)
    check_runs(runs, sizes)
    if sizes:
        assert planner.next_run(sizes) == runs[0]


@given(
    st.sets(st.tuples(small, small, small), max_size=6),
    st.lists(st.tuples(small, small), max_size=40),
    st.integers(0, 99),
)
def test_with_several_axes_no_row_is_lost_and_nothing_costs_more_than_alone(
    boxes: set[tuple[int, int, int]], sizes: list[tuple[int, int]], seed: int
) -> None:
    grid = Grid.explicit(IMAGE, {*boxes, (1, 4, 4)})
    cost = priced(seed)
    runs = plan(np.array(sizes, int).reshape(len(sizes), 2), grid, cost)
    check_runs(runs, sizes)
    alone = sum(min(map(cost, grid.candidates(1, size))) for size in sizes)
    assert sum(cost(run.bucket) for run in runs) <= alone + 1e-9
    if sizes:
        assert Planner(grid, cost).next_run(sizes) == runs[0]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.floats(0, 40), min_size=5, max_size=5),
    st.floats(0, 3),
)
def test_lateness_is_paid_for_by_smaller_runs(lengths: list[int], slack: list[float], price: float) -> None:
    grid = power_grid(4, 4)
    late = Lateness(slack[: len(lengths)], price)

    def total(groups: list[tuple[float, tuple[int, ...]]]) -> float:
        return sum(cost + price * sum(max(0.0, cost - slack[row]) for row in rows) for cost, rows in groups)

    def billed(runs: list[Run]) -> float:
        return total([(elements(run.bucket), run.rows) for run in runs])

    def elements(bucket: Bucket) -> float:
        return float(2 + bucket.elements)

    sizes = [(length,) for length in lengths]
    runs = plan(np.array(sizes), grid, elements, lateness=late)
    assert sorted(row for run in runs for row in run.rows) == list(range(len(sizes)))
    alone = [(elements(grid.smallest(1, size)), (row,)) for row, size in enumerate(sizes)]
    assert billed(runs) <= total(alone) + 1e-9
