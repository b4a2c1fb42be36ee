import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import DoesNotFit, Ladder, LadderError, bounded_waste, report


def test_B5_a_size_on_a_rung_uses_that_rung() -> None:
    ladder = Ladder((64, 128, 256))
    sizes = [64, 65, 128, 129, 256]
    assert [ladder.rung_for(size) for size in sizes] == [64, 128, 128, 256, 256]
    assert ladder.rungs_for(sizes).tolist() == [64, 128, 128, 256, 256]
    assert ladder.rungs_for(np.array([[64], [65]])).tolist() == [[64], [128]]


@given(st.sets(st.integers(1, 400), min_size=1), st.data())
def test_the_rung_is_the_smallest_that_holds_the_size(rungs: set[int], data: st.DataObject) -> None:
    ladder = Ladder(tuple(sorted(rungs)))
    size = data.draw(st.integers(0, ladder.limit))
    assert ladder.rung_for(size) == min(rung for rung in rungs if rung >= size)
    assert ladder.rungs_for([size])[0] == ladder.rung_for(size)


@pytest.mark.parametrize("rungs", [(), (0, 1), (4, 4), (8, 4), (1.5,), (True, 2), ("4",)])
def test_rungs_rise_strictly_from_one(rungs: tuple[int, ...]) -> None:
    with pytest.raises(LadderError, match="got"):
        Ladder(rungs)


def test_beyond_the_limit_names_size_and_limit() -> None:
    ladder = Ladder((64, 128))
    with pytest.raises(DoesNotFit, match="limit of 128; got 129"):
        ladder.rung_for(129)
    with pytest.raises(DoesNotFit, match="limit of 128; got 300"):
        ladder.rungs_for([3, 300, 400])
    with pytest.raises(LadderError, match="at least 0; got -1"):
        ladder.rung_for(-1)
    with pytest.raises(LadderError, match="float64"):
        ladder.rungs_for([1.5])


def test_no_sizes_have_no_rungs() -> None:
    assert Ladder((4,)).rungs_for([]).shape == (0,)


def test_B9_the_report_tells_share_padding_and_the_missing_rung() -> None:
    found = report(Ladder((256, 512)), {64: 1000})
    assert found.waste == pytest.approx(0.75)
    assert [rung.share for rung in found.rungs] == [1.0, 0.0]
    assert found.rungs[0].mean_padding == found.rungs[0].seen_padding == pytest.approx(0.75)
    assert found.worth_adding == 64
    assert found.saving == pytest.approx(0.75)

    uneven = report(Ladder((128, 256, 512, 1400)), [513, 1400, 100])
    assert uneven.rungs[-1].worst_padding == pytest.approx(0.6336, abs=1e-3)
    assert uneven.rungs[-1].worst_size == 513
    assert Ladder((128, 256, 512, 1400)).worst_padding() == (pytest.approx(0.6336, abs=1e-3), 513)
    assert "513" in str(uneven)


@given(st.integers(1, 3000), st.integers(1, 99))
def test_B9_bounded_waste_holds_above_the_smallest_rung(limit: int, percent: int) -> None:
    waste, _ = bounded_waste(percent).ladder(limit).worst_padding()
    assert waste <= percent / 100 + 1e-12


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.dictionaries(st.integers(0, 60), st.integers(1, 9), min_size=1),
)
def test_the_rung_worth_adding_saves_most(rungs: set[int], counts: dict[int, int]) -> None:
    ladder = Ladder(tuple(sorted(rungs | {max(*counts, 1)})))

    def padded(with_rungs: Ladder) -> int:
        return sum(count * with_rungs.rung_for(size) for size, count in counts.items())

    before = padded(ladder)
    others = [Ladder(tuple(sorted({*ladder, extra}))) for extra in range(1, ladder.limit)]
    best = min(map(padded, others), default=before)
    found = report(ladder, counts)
    assert found.saving == pytest.approx(1 - best / before)
    assert (found.worth_adding is None) == (best == before)
