"""The door's shortcut against the check it stands for."""

import re
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from servax.jit_cache import InputError, ItemTooLarge, NonFinite, Servable, check_item
from servax.server import BadTensor, NonFiniteInput, ServerError, TooLong
from servax.server.hosting.door import Door

DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_]
MEANS = {ItemTooLarge: TooLong, NonFinite: NonFiniteInput, InputError: BadTensor}


def servable(**options):
    return Servable(
        lambda x, frame, flag: x,
        inputs={"x": "float32[length]", "frame": "float32[length, 3]", "flag": "int32[]"},
        limits={"batch": 2, "length": 6},
        **options,
    )


STRICT, LAX = servable(), servable(allow_nonfinite=True)
DOORS = {STRICT: Door(STRICT), LAX: Door(LAX)}
lengths = st.integers(0, 8)


def arrays(shape):
    dtype = st.sampled_from([np.float32] * 8 + DTYPES)
    return dtype.flatmap(lambda one: hnp.arrays(one, shape))


@st.composite
def rows(draw):
    length = draw(lengths)
    other = draw(st.sampled_from([length] * 9 + [1]))
    width = draw(st.sampled_from([3] * 9 + [2, 4, 0]))
    row = {
        "x": draw(arrays((length,))),
        "frame": draw(arrays((other, width))),
        "flag": draw(st.sampled_from([np.int32(1), np.array(1, np.int32), 1, 1.5, np.array([1], np.int32)])),
    }
    if draw(st.integers(0, 9)) == 0:
        row.pop(draw(st.sampled_from(sorted(row))))
    if draw(st.integers(0, 9)) == 0:
        row["more"] = np.zeros(1)
    if draw(st.integers(0, 4)) == 0:
        row["x"] = row.get("x", np.zeros(2))[::-1]
    return row


@given(rows(), st.sampled_from([STRICT, LAX]))
def test_the_shortcut_decides_as_the_full_check_does(row, servable):
    try:
        wanted = check_item(
            servable.signature, row, servable.limits, allow_nonfinite=servable.allow_nonfinite
        )
    except InputError as error:
        with pytest.raises(MEANS[type(error)], match=re.escape(str(error))):
            DOORS[servable].check([row])
        return
    (item,), (sizes,) = DOORS[servable].check([row])
    assert sizes == wanted[1]
    assert set(item) == set(wanted[0])
    for name, array in wanted[0].items():
        assert item[name].dtype == array.dtype
        assert np.array_equal(item[name], array, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("length", [1, 6])
def test_large_values_pass_and_values_that_are_none_do_not(value, length):
    row = {
        "x": np.zeros(length, np.float32),
        "frame": np.zeros((length, 3), np.float32),
        "flag": np.array(1, np.int32),
    }
    row["frame"][length - 1, 1] = value
    if np.isfinite(value):
        assert DOORS[STRICT].check([row])[1] == [(length,)]
    else:
        with pytest.raises(NonFiniteInput, match="'frame' must be finite"):
            DOORS[STRICT].check([row])
    assert DOORS[LAX].check([row])[1] == [(length,)]


def test_a_large_input_is_looked_at_value_by_value():
    large = Servable(lambda x: x, inputs={"x": "float32[n]"}, limits={"n": 100_000})
    x = np.zeros(100_000, np.float32)
    assert Door(large).check([{"x": x}])[1] == [(100_000,)]
    x[-1] = np.nan
    with pytest.raises(NonFiniteInput):
        Door(large).check([{"x": x}])


@pytest.mark.parametrize("row", [None, [1.0], "x", 5])
def test_a_row_that_is_no_mapping(row):
    with pytest.raises(BadTensor, match="mapping"):
        DOORS[STRICT].check([row])


def test_any_mapping_will_do():
    row = MappingProxyType(
        {"x": np.ones(2, np.float32), "frame": np.ones((2, 3), np.float32), "flag": np.array(1, np.int32)}
    )
    assert DOORS[STRICT].check([row])[1] == [(2,)]


def test_several_rows_name_the_one_at_fault():
    good = {
        "x": np.zeros(2, np.float32),
        "frame": np.zeros((2, 3), np.float32),
        "flag": np.array(1, np.int32),
    }
    with pytest.raises(ServerError, match=r"^row 2: "):
        DOORS[STRICT].check([good, good, {}, good])
