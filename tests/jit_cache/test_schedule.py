"""The order of a warm-up by what each program saves, and the file of recorded requests behind it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid
from servax.jit_cache import WarmupError, warmup_order
from servax.jit_cache.recorded import read_recorded
from servax.jit_cache.schedule import Shape, covering_bucket, saved_by_bucket, value_order

AXES = ("batch", "length")
GRID = Grid.parse("1x64,1x16,4x16,4x64,1x32,4x32", AXES)


def bucket(rows, length):
    return Bucket(AXES, (rows, length))


def seconds(one):
    return float(one.elements)


def total(chosen, shapes):
    """Seconds of all requests with these programs, by hand."""
    spent = 0.0
    for shape in shapes:
        spent += shape.count * min(
            -(-shape.rows // one.rows) * seconds(one)
            for one in chosen
            if all(a >= b for a, b in zip(one.item_sizes, shape.sizes, strict=True))
        )
    return spent


def test_W5_the_covering_bucket_is_first_then_what_the_traffic_uses():
    shapes = [Shape(4, (16,), 100.0), Shape(1, (32,), 1.0)]
    order = value_order(GRID, shapes, seconds=seconds)
    assert order[0] == covering_bucket(GRID) == bucket(1, 64)
    # 4 rows of 16 alone cost 256 in the covering bucket, 64 in their own or in four runs of 1x16.
    assert {order[1], order[2]} == {bucket(1, 16), bucket(1, 32)} or order[1] == bucket(4, 16)
    assert sorted(order) == sorted(GRID.buckets)


def test_W5_what_compiles_for_long_comes_later():
    shapes = [Shape(1, (16,), 60.0), Shape(1, (32,), 10.0)]
    dear = value_order(
        GRID, shapes, seconds=seconds, compile_s=lambda one: 100.0 if one["length"] == 16 else 1.0
    )
    cheap = value_order(GRID, shapes, seconds=seconds)
    assert cheap[1]["length"] == 16
    assert dear[1]["length"] == 32


def test_without_traffic_it_goes_from_cheap_to_dear():
    assert value_order(GRID, []) == warmup_order(GRID)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 64), st.floats(0.1, 100)), min_size=1, max_size=12)
)
def test_W5_every_prefix_serves_all_and_each_step_gains_at_least_as_much_as_the_next(drawn):
    shapes = [Shape(rows, (length,), count) for rows, length, count in drawn]
    order = value_order(GRID, shapes, seconds=seconds)
    assert sorted(order) == sorted(GRID.buckets)
    spent = [total(order[:end], shapes) for end in range(1, len(order) + 1)]
    gains = -np.diff(spent)
    assert (gains >= -1e-6).all()
    # The first choice is the best single one there is.
    best = max(spent[0] - total([order[0], one], shapes) for one in GRID.buckets)
    assert gains[0] == pytest.approx(best)


def test_what_does_not_fit_the_grid_counts_for_nothing():
    assert value_order(GRID, [Shape(1, (65,))], seconds=seconds) == warmup_order(GRID)


def test_W6_the_worth_of_a_bucket_is_what_its_traffic_would_lose():
    worth = saved_by_bucket(GRID, [Shape(1, (16,), 3.0), Shape(1, (64,), 2.0)], seconds)
    assert worth[bucket(1, 16)] == 3.0 * 16  # in 1x32 it would take 32 and not 16
    assert worth[bucket(1, 64)] == 2.0 * 192
    assert worth[bucket(4, 64)] == 0.0


def test_W8_a_recorded_file_gives_the_shapes_of_a_model(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"rows": 3, "length": 17}\n\n{"length": 40, "count": 12, "model": "a"}\n{"height": 3, "width": 4}\n'
    )
    recorded = read_recorded(path)
    assert recorded.shapes("a", ("length",)) == [Shape(3, (17,)), Shape(1, (40,), 12)]
    assert recorded.shapes("b", ("length",)) == [Shape(3, (17,))]
    assert recorded.shapes("b", ("width", "height")) == [Shape(1, (4, 3))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("length=3", "no JSON"),
        ("[3]", "no object but list"),
        ('{"length": 0}', "length is a whole number"),
        ('{"length": 2.5}', "got 2.5"),
        ('{"length": 3, "count": -1}', "a count is a number above 0"),
        ('{"length": 3, "rows": true}', "rows is a whole number"),
        ('{"length": 3, "model": 7}', "a model's name is text"),
    ],
)
def test_W8_a_malformed_line_is_named(tmp_path, line, words):
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"length": 5}}\n{line}\n')
    with pytest.raises(WarmupError, match=f"line 2 is not: .*{words}"):
        read_recorded(path)
    lenient = read_recorded(path, strict=False)
    assert len(lenient.lines) == 1
    assert words in lenient.problems[2]


def test_W8_a_missing_or_empty_file_is_an_error_in_any_case(tmp_path):
    with pytest.raises(WarmupError, match="cannot be"):
        read_recorded(tmp_path / "none.jsonl", strict=False)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(WarmupError, match="is empty"):
        read_recorded(tmp_path / "empty.jsonl", strict=False)
