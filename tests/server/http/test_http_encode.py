"""Datatypes, casts and byte forms, as properties."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from servax.server.errors import BadTensor
from servax.server.http.encode import (
    DATATYPES,
    base64_float32,
    cast,
    datatype_of,
    dumps,
    from_bytes,
    from_json,
)

NATIVE = [name for name in DATATYPES if name != "BF16"]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    name = draw(st.sampled_from(NATIVE))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    finite = {"allow_nan": False, "allow_infinity": False} if name.startswith("FP") else {}
    elements = hnp.from_dtype(DATATYPES[name], **finite)
    return name, draw(hnp.arrays(DATATYPES[name], shape, elements=elements))


@given(arrays())
def test_bytes_and_json_round_trip(named: tuple[str, np.ndarray]) -> None:
    name, array = named
    back = from_bytes(array.tobytes(), name, array.shape, "x")
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for data in (array.ravel(), array):
        back = from_json(dumps(np.ascontiguousarray(data)), name, array.shape, "x")
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


@given(arrays(), st.sampled_from(NATIVE))
def test_a_cast_keeps_whole_numbers_or_refuses_naming_both(
    named: tuple[str, np.ndarray], target: str
) -> None:
    name, array = named
    try:
        result = cast(array, DATATYPES[target], "x")
    except BadTensor as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert name in refusal
        assert target in refusal
        return
    assert result.dtype == DATATYPES[target]
    assert np.isfinite(result.astype(np.float64)).all()
    if array.dtype.kind in "iu":
        assert [int(v) for v in result.ravel()] == [int(v) for v in array.ravel()]


@given(hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32, allow_nan=False)))
def test_base64_holds_little_endian_float32(vector: np.ndarray) -> None:
    import base64

    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(base64_float32(vector)), "<f4"), vector)


def test_infinity_and_nan_pass_casts_between_floats() -> None:
    odd = np.array([np.nan, np.inf, -np.inf], np.float64)
    for name in ("FP16", "FP32", "BF16"):
        np.testing.assert_array_equal(cast(odd, DATATYPES[name], "x").astype(np.float64), odd)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (1e39, np.float64, "FP32"),
        (70000.0, np.float32, "FP16"),
        (1e39, np.float64, "BF16"),
        (-1, np.int8, "UINT64"),
    ],
)
def test_what_does_not_fit_is_refused(value: Any, source: Any, target: str) -> None:
    with pytest.raises(BadTensor, match=target):
        cast(np.array([0, value], source), DATATYPES[target], "x")


def test_unknown_dtypes_are_refused() -> None:
    assert datatype_of(np.dtype(ml_dtypes.bfloat16)) == "BF16"
    with pytest.raises(BadTensor, match="complex64"):
        datatype_of(np.dtype(np.complex64))


def test_json_floats_of_float32_stay_short() -> None:
    assert dumps(np.array([0.1, 1 / 3], np.float32)) == b"[0.1,0.33333334]"
    assert json.loads(dumps({"a": np.arange(3)})) == {"a": [0, 1, 2]}
