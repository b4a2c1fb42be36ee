"""A packed row: the first in line is in it, nothing fills it better, and the old go before the young."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing.packed_row import fill_row

COLUMNS = 64

lines = st.lists(st.integers(1, COLUMNS), min_size=1, max_size=9)


def best_sum(lengths, most):
    """By trying all subsets that hold the first."""
    return max(
        sum(some) + lengths[0]
        for count in range(min(most, len(lengths)))
        for some in combinations(lengths[1:], count)
        if sum(some) + lengths[0] <= COLUMNS
    )


@given(lines, st.integers(1, 9), st.integers(1, COLUMNS))
def test_the_first_and_others_that_fit(lengths, most, enough):
    row = fill_row(lengths, range(len(lengths)), COLUMNS, most, enough)
    assert row[0] == 0
    assert len(row) == len(set(row)) <= most
    assert sum(lengths[place] for place in row) <= COLUMNS


@given(lines, st.integers(1, COLUMNS))
def test_no_other_choice_fills_it_better(lengths, enough):
    row = fill_row(lengths, range(len(lengths)), COLUMNS, len(lengths), enough)
    assert sum(lengths[place] for place in row) >= min(enough, best_sum(lengths, len(lengths)))


@given(lines, st.integers(1, 4))
def test_where_items_are_bounded_no_item_is_left_that_has_room(lengths, most):
    row = fill_row(lengths, range(len(lengths)), COLUMNS, most, COLUMNS)
    free = COLUMNS - sum(lengths[place] for place in row)
    left = [length for place, length in enumerate(lengths) if place not in row]
    assert len(row) == most or all(length > free for length in left)


def test_who_waits_longest_goes_first():
    # 16 + 24 + 24 and 16 + 48 both fill it; the young 48 is not needed, and neither is the last 24.
    assert fill_row([16, 24, 24, 48, 24], range(5), COLUMNS, 8, COLUMNS) == [0, 1, 2]


def test_a_row_that_is_full_enough_takes_no_younger_ones():
    lengths = [30, 31, 34]
    assert fill_row(lengths, range(3), COLUMNS, 8, COLUMNS) == [0, 2]
    assert fill_row(lengths, range(3), COLUMNS, 8, 60) == [0, 1]


def test_the_line_may_be_in_any_order():
    assert fill_row([30, 31, 34], [2, 0, 1], COLUMNS, 8, COLUMNS) == [2, 0]
