"""The door: what one item may be."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.jit_cache import InputError, ItemTooLarge, NonFinite, Signature, check_item
from servax.jit_cache.check import cast_exact

TEXT = Signature.parse(
    {"ids": "int32[length]", "weights": "float32[length]", "kind": "int32[]", "mask": "mask[length]"}
)
LIMITS = {"batch": 8, "length": 16}
GOOD = {"ids": [5, 6, 7], "weights": [0.5, 1.0, 2.0], "kind": 3}


def check(item, **options):
    return check_item(TEXT, item, LIMITS, **options)


def test_an_item_comes_out_in_the_declared_form():
    arrays, sizes = check(GOOD)
    assert sizes == (3,)
    assert {name: (one.dtype, one.shape) for name, one in arrays.items()} == {
        "ids": (np.int32, (3,)),
        "weights": (np.float32, (3,)),
        "kind": (np.int32, ()),
    }


def test_an_array_of_the_declared_dtype_is_not_copied():
    ids = np.arange(3, dtype=np.int32)
    arrays, _ = check(GOOD | {"ids": ids})
    assert arrays["ids"] is ids


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": [1, 1, 1]}, InputError, r"inputs are \['ids', 'weights', 'kind'\]; got unknown \['mask'\]"),
        ({"ids": None}, InputError, "'ids' is None: send it"),
        (
            {"ids": [[5, 6, 7]]},
            InputError,
            r"dims \['length'\] for one item; got shape \[1, 3\]: send 1 dims",
        ),
        ({"kind": [3]}, InputError, r"got shape \[1\]: send 0 dims"),
        ({"ids": []}, InputError, "axis 'length' must not be empty"),
        ({"ids": [1] * 17}, ItemTooLarge, "limited to 16; input 'ids' has 17: send at most 16"),
        ({"weights": [1.0]}, InputError, "share the size of axis 'length', here 3; input 'weights' has 1"),
        ({"ids": [1.0, 2.0, 3.0]}, InputError, "'ids' has dtype int32; got float64: cast it"),
        ({"ids": [2**31, 1, 1]}, InputError, "int32, -2147483648 to 2147483647; got int64 values from 1 to"),
        ({"ids": [2**70, 1, 1]}, InputError, "got object: send numbers"),
        ({"ids": ["a", "b", "c"]}, InputError, "got <U1: send numbers"),
        ({"ids": [b"a", b"b", b"c"]}, InputError, "got .*S1.*: send numbers"),
        ({"ids": {"a": 1}}, InputError, "got object: send numbers"),
        ({"ids": [[1], [1, 2]]}, InputError, "must be a rectangular array"),
        ({"ids": [True, False, True]}, InputError, "got bool: cast it"),
        ({"ids": np.zeros(3, "datetime64[s]")}, InputError, "send numbers"),
        ({"weights": [1j, 0, 0]}, InputError, "got complex128: cast it"),
        ({"weights": [1.0, np.nan, 0]}, NonFinite, "'weights' must be finite"),
        ({"weights": [1.0, np.inf, 0]}, NonFinite, "'weights' must be finite"),
        ({"weights": [1e300, 0, 0]}, InputError, "float64 values beyond its range"),
    ],
)
def test_what_is_refused_and_why(change, error, message):
    with pytest.raises(error, match=message):
        check(GOOD | change)


def test_C5_a_missing_input_is_named_before_the_run():
    with pytest.raises(InputError, match="'kind' is missing: send it"):
        check({"ids": [1], "weights": [1.0]})


@pytest.mark.parametrize("item", [[1, 2], None, "ids", 3])
def test_an_item_is_a_mapping(item):
    with pytest.raises(InputError, match="an item is a mapping"):
        check(item)


def test_nan_passes_where_it_is_allowed():
    arrays, _ = check(GOOD | {"weights": [np.nan, np.inf, 0]}, allow_nonfinite=True)
    assert np.isnan(arrays["weights"][0])
    assert np.isinf(arrays["weights"][1])


def test_overflow_is_refused_even_where_infinity_is_allowed():
    with pytest.raises(InputError, match="beyond its range"):
        check(GOOD | {"weights": [1e300, np.inf, 0]}, allow_nonfinite=True)


def test_a_fixed_dim_must_match():
    image = Signature.parse({"image": "uint8[height, width, 3]"})
    with pytest.raises(InputError, match=r"got shape \[4, 5, 4\], where 4 must be 3"):
        check_item(image, {"image": np.zeros((4, 5, 4), np.uint8)}, {"height": 8, "width": 8})
    _, sizes = check_item(image, {"image": np.zeros((4, 5, 3), np.uint8)}, {"height": 8, "width": 8})
    assert sizes == (4, 5)


def test_no_varying_axis():
    fixed = Signature.parse({"x": "float32[4]"})
    arrays, sizes = check_item(fixed, {"x": range(4)}, {"batch": 8})
    assert sizes == ()
    np.testing.assert_array_equal(arrays["x"], np.arange(4, dtype=np.float32))


def test_a_repeated_axis_is_square():
    bias = Signature.parse({"bias": "float32[n, n]"})
    with pytest.raises(InputError, match="share the size of axis 'n', here 2; input 'bias' has 3"):
        check_item(bias, {"bias": np.zeros((2, 3))}, {"n": 8})


@pytest.mark.parametrize("given", [{}, {"types": None}])
def test_C5_an_optional_input_is_filled_by_its_pad_value(given):
    signature = Signature.parse({"ids": "int32[length]", "types": "int32[length]? = 2"})
    arrays, sizes = check_item(signature, {"ids": [7, 8], **given}, {"length": 4})
    assert sizes == (2,)
    np.testing.assert_array_equal(arrays["types"], np.array([2, 2], np.int32))
    sent, _ = check_item(signature, {"ids": [7, 8], "types": [0, 1]}, {"length": 4})
    np.testing.assert_array_equal(sent["types"], [0, 1])


INTEGERS = [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, ml_dtypes.int4, ml_dtypes.uint4]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.sampled_from(INTEGERS))
def test_integers_are_cast_exactly_or_refused(values, dtype):
    bounds = ml_dtypes.iinfo(dtype)
    try:
        cast = cast_exact("x", values, np.dtype(dtype))
    except InputError:
        assert min(values) < bounds.min or max(values) > bounds.max
    else:
        assert cast.dtype == dtype
        assert [int(one) for one in cast] == values


FLOATS = [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.sampled_from(FLOATS),
)
def test_floats_are_rounded_or_refused_but_never_overflow(values, dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    try:
        cast = cast_exact("x", values, np.dtype(dtype))
    except InputError:
        assert max(map(abs, values)) > largest
    else:
        assert np.isfinite(cast).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_refused_in_every_float(dtype):
    name = np.dtype(dtype).name
    signature = Signature.parse({"x": f"{name}[length]"})
    with pytest.raises(NonFinite):
        check_item(signature, {"x": np.array([0, np.nan]).astype(dtype)}, {"length": 4})


@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [
        ([1, 0], np.bool_, [True, False]),
        ([1, 2], np.float32, [1.0, 2.0]),
        ([True, False], np.float32, [1.0, 0.0]),
        ([0.1], ml_dtypes.bfloat16, [0.1]),
        ([1.5], np.complex64, [1.5]),
        (np.array([1, 2], ">i4"), np.int32, [1, 2]),
        (np.array([1, 2], np.uint64), np.int32, [1, 2]),
        (np.array([1, 2], ml_dtypes.int4), np.int32, [1, 2]),
        ([], np.int32, []),
    ],
)
def test_what_is_cast(value, dtype, wanted):
    cast = cast_exact("x", value, np.dtype(dtype))
    assert cast.dtype == dtype
    np.testing.assert_array_equal(cast, np.asarray(wanted).astype(dtype))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [([2], np.bool_), ([0.0], np.bool_), ([0.0], ml_dtypes.int4), (["1"], np.float32), ([70000], np.float16)],
)
def test_what_is_not_cast(value, dtype):
    with pytest.raises(InputError):
        cast_exact("x", value, np.dtype(dtype))
