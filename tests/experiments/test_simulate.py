"""The simulator: nobody is lost, the device never rests while somebody waits, and the sums are right."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid, Ladder
from servax.experiments.errors import ExperimentError, Stalled
from servax.experiments.packed import PackingBatcher
from servax.experiments.simulate import Simulated, grid_batcher, simulate
from servax.server.batching.batcher import Policy

GRID = Grid.product({"batch": Ladder((1, 2, 4)), "length": Ladder((4, 7, 20))})
PACKED = Ladder((20, 33))


def cost(bucket: Bucket) -> float:
    return 0.5 + 0.01 * bucket.elements


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=40))
    gaps = draw(st.lists(st.floats(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, np.cumsum(gaps).tolist()


def run(lengths: list[int], arrivals: list[float], kind: str) -> Simulated:
    if kind == "packed":
        return simulate(lengths, arrivals, PackingBatcher(PACKED, window=8), cost)
    policy = Policy(max_wait_s=0.7) if kind == "waiting" else None
    return simulate(lengths, arrivals, grid_batcher(GRID, cost, policy), cost)


@given(traffic(), st.sampled_from(["padded", "waiting", "packed"]))
def test_every_request_is_answered_once_and_after_it_came(
    load: tuple[list[int], list[float]], kind: str
) -> None:
    lengths, arrivals = load
    found = run(lengths, arrivals, kind)
    assert np.isfinite(found.done_s).all()
    assert sum(ran.rows for ran in found.launches) == len(lengths)
    assert sum(ran.real for ran in found.launches) == sum(lengths)
    assert (found.latency_s >= cost(Bucket(("batch", "length"), (1, 4))) - 1e-9).all()


@given(traffic(), st.sampled_from(["padded", "packed"]))
def test_the_device_never_rests_while_somebody_waits(load: tuple[list[int], list[float]], kind: str) -> None:
    """Each launch starts when the one before ends, or else at the arrival of the only ones waiting."""
    lengths, arrivals = load
    found = run(lengths, arrivals, kind)
    free_s, answered = -math.inf, 0
    for ran in found.launches:
        assert ran.start_s >= free_s
        assert ran.end_s == pytest.approx(ran.start_s + cost(ran.bucket))
        came = sorted(arrivals)[answered]
        assert ran.start_s == pytest.approx(max(free_s, came)) or ran.start_s == free_s
        free_s, answered = ran.end_s, answered + ran.rows
    assert found.busy_s == pytest.approx(sum(cost(ran.bucket) for ran in found.launches))
    assert 0 < found.utilisation <= 1 + 1e-9


@given(traffic())
def test_waste_is_what_counting_by_hand_gives(load: tuple[list[int], list[float]]) -> None:
    lengths, arrivals = load
    found = run(lengths, arrivals, "padded")
    computed = 0
    for ran in found.launches:
        rows, length = ran.bucket.sizes
        assert ran.rows <= rows
        computed += rows * length
    assert found.waste == pytest.approx(1 - sum(lengths) / computed)
    assert sum(found.use().values()) == len(found.launches)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_one_row_buckets_waste_what_the_ladder_wastes(lengths: list[int]) -> None:
    ladder = Ladder((4, 7, 20))
    grid = Grid.product({"batch": Ladder((1,)), "length": ladder})
    found = simulate(lengths, [0.0] * len(lengths), grid_batcher(grid, cost), cost)
    assert found.waste == pytest.approx(1 - sum(lengths) / sum(map(ladder.rung_for, lengths)))
    assert found.requests_per_s == pytest.approx(len(lengths) / found.busy_s)


def test_a_compile_on_the_path_is_paid_by_the_first_run_of_a_bucket() -> None:
    grid = Grid.product({"batch": Ladder((1,)), "length": Ladder((4, 20))})
    found = simulate([4, 4, 20], [0, 100, 200], grid_batcher(grid, cost), cost, first_run_s=lambda _: 9.0)
    assert found.latency_s.tolist() == pytest.approx([9.54, 0.54, 9.7])


def test_an_idle_device_waits_as_long_as_the_policy_says() -> None:
    found = run([3], [1.0], "waiting")
    assert found.launches[0].start_s == pytest.approx(1.7)


def test_packing_takes_the_oldest_and_fills_the_row_with_the_longest_that_fit() -> None:
    found = simulate([5, 9, 10, 6, 8], [0.0] * 5, PackingBatcher(Ladder((20,))), cost)
    # 5 with 10, then 9 with 8, then 6 alone.
    assert [ran.real for ran in found.launches] == [15, 17, 6]
    assert found.waste == pytest.approx(1 - 38 / 60)


def test_packing_takes_the_capacity_that_is_filled_best() -> None:
    found = simulate([19, 13], [0.0, 0.0], PackingBatcher(PACKED), cost)
    assert [str(ran.bucket) for ran in found.launches] == ["1x33"]
    found = simulate([19, 5], [0.0, 0.0], PackingBatcher(PACKED), cost)
    assert [str(ran.bucket) for ran in found.launches] == ["1x20", "1x20"]


class Lazy:
    """A batcher that never launches."""

    def __init__(self, answer: float) -> None:
        self.answer = answer

    def add(self, request: object) -> None:
        pass

    def next(self, now_s: float) -> float:
        return self.answer


@pytest.mark.parametrize("answer", [math.inf, 0.0, math.nan])
def test_a_batcher_that_never_launches_is_named(answer: float) -> None:
    with pytest.raises(Stalled, match="1 requests unanswered"):
        simulate([3], [0.0], Lazy(answer), cost)


@pytest.mark.parametrize(
    ("lengths", "arrivals", "message"),
    [([1, 2], [0.0], r"shape \(n, axes\)"), ([1, 2], [1.0, 0.0], "do not fall"), ([1], [math.nan], "finite")],
)
def test_traces_that_are_none_are_refused(lengths: list[int], arrivals: list[float], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        simulate(lengths, arrivals, grid_batcher(GRID, cost), cost)


@settings(max_examples=20)
@given(st.integers(1, 4))
def test_a_slower_device_answers_no_sooner(factor: int) -> None:
    lengths, arrivals = [3, 20, 7, 7, 1, 12], [0.0, 0.1, 0.2, 3.0, 3.1, 9.0]
    grid = Grid.product({"batch": Ladder((1,)), "length": Ladder((20,))})
    quick = simulate(lengths, arrivals, grid_batcher(grid, cost), cost)
    slow = simulate(lengths, arrivals, grid_batcher(grid, cost), lambda bucket: factor * cost(bucket))
    assert (slow.done_s >= quick.done_s - 1e-9).all()
