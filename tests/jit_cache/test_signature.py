"""The grammar of declarations."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket
from servax.jit_cache import Input, Made, Signature, SignatureError
from servax.jit_cache.signature import parse_input

DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint32", "float16", "float32", "complex64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
]  # fmt: skip
AXES = ["length", "height", "width", "_x1", "batches"]
dims = st.lists(st.one_of(st.sampled_from(AXES), st.integers(1, 4096)), max_size=4)
blanks = st.sampled_from(["", " ", "  "])


@given(
    kind=st.sampled_from(DTYPES),
    dims=dims,
    pad=st.sampled_from([None, "0", "1"]),
    optional=st.booleans(),
    blank=blanks,
)
def test_what_is_declared_is_what_is_read(kind, dims, pad, optional, blank):
    text = f"{blank}{kind}{blank}[{f'{blank},{blank}'.join(map(str, dims))}]{'?' if optional else ''}"
    text += blank if pad is None else f"{blank}={blank}{pad}{blank}"
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    assert parse_input("x", text) == Input("x", dtype, tuple(dims), int(pad or 0), optional)


@given(
    kind=st.sampled_from(["mask", "lengths", "positions"]), axes=st.lists(st.sampled_from(AXES), max_size=3)
)
def test_made_inputs_take_axes_only(kind, axes):
    text = f"{kind}[{', '.join(axes)}]"
    if not axes or (kind != "mask" and len(axes) > 1):
        with pytest.raises(SignatureError, match="made by the server from varying axes"):
            parse_input("m", text)
        return
    made = parse_input("m", text)
    assert isinstance(made, Made)
    assert made.dims == tuple(axes)
    assert made.dtype == (np.bool_ if kind == "mask" else np.int32)


kinds = st.builds(
    str.__add__, st.sampled_from(["", "int", "float", "b"]), st.text("abcdefimouUSV0123459_", max_size=4)
)


def read_or_refused(declaration):
    """The parsed input, or None after an error that names it."""
    try:
        return parse_input("x", declaration)
    except SignatureError as error:
        if "'x'" not in str(error):
            raise
        return None


@given(kinds)
def test_any_name_of_a_dtype_is_read_or_refused(kind):
    parsed = read_or_refused(f"{kind}[length]")
    assert parsed is None or parsed.dtype.name == kind


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    for declaration in (text, f"int32[{text}]", f"{text}[length]", f"float32[length] = {text}"):
        read_or_refused(declaration)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("int32", r"declared as 'dtype\[dims\]'.*'int32'"),
        ("int32[length", r"declared as 'dtype\[dims\]'"),
        (None, r"declared as 'dtype\[dims\]'.*None"),
        ("int32[length,,3]", "a dim is a number from 1 up.*''"),
        ("int32[length,]", "a dim is a number from 1 up"),
        ("int32[0]", "a dim is a number from 1 up.*'0'"),
        ("int32[-1]", "a dim is a number from 1 up.*'-1'"),
        ("int32[²]", "a dim is a number from 1 up"),
        ("int32[batch]", "'batch' is added by the server"),
        ("int32[max]", "plain identifier other than"),
        ("int32[for]", "plain identifier other than"),
        ("int32[länge]", "plain identifier other than"),
        ("int32[2*length]", "a dim is a number"),
        ("int33[length]", "a dtype is one that JAX computes with.*'int33'"),
        ("object[length]", "a dtype is one that JAX computes with"),
        ("finfo[length]", "a dtype is one that JAX computes with"),
        ("datetime64[length]", "a dtype is one that JAX computes with"),
        ("float128[length]", "a dtype is one that JAX computes with"),
        ("2f4[length]", "a dtype is one that JAX computes with"),
        ("longdouble[length]", "a dtype is one that JAX computes with"),
        ("str[length]", "a dtype is one that JAX computes with"),
        ("int64[length]", "64-bit types need jax_enable_x64.*declare int32"),
        ("float64[length]", "declare float32"),
        ("complex128[length]", "declare complex64"),
        ("mask[3]", "made by the server from varying axes"),
        ("mask[length] = 1", "made by the server from varying axes"),
        ("mask[length]?", "made by the server from varying axes"),
    ],
)
def test_a_refusal_states_rule_and_value(declaration, message):
    with pytest.raises(SignatureError, match=message):
        parse_input("x", declaration)


@pytest.mark.parametrize("name", ["", "a b", "1x", "x-y", 3])
def test_names_are_identifiers(name):
    with pytest.raises(SignatureError, match="must be an identifier"):
        parse_input(name, "int32[length]")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("bool", ["0", "1", "true", "False"], ["2", "0.5", "yes"]),
        ("uint8", ["0", "255"], ["256", "-1", "1.5", "nan", "inf", "1e2", "true"]),
        ("int32", ["-100", "2147483647"], ["2147483648", "0.0"]),
        ("int4", ["-8", "7"], ["8", "-9"]),
        ("float32", ["-1", "0.5", "1e38", "nan", "-inf"], ["1e39", "x", "-1e400x"]),
        ("float16", ["65504"], ["70000"]),
        ("bfloat16", ["3.14", "1e38", "inf"], ["1e39"]),
        ("float8_e4m3fn", ["448", "nan"], ["1000", "inf"]),
        ("complex64", ["1.5"], ["1e39", "j"]),
    ],
)
def test_the_pad_value_is_one_that_the_dtype_holds(kind, good, bad):
    for text in good:
        parsed = parse_input("x", f"{kind}[length] = {text}")
        kept = np.full(1, parsed.pad, parsed.dtype)
        wanted = {"true": 1, "False": 0}.get(text, text)
        assert np.isnan(float(wanted)) or kept == np.asarray(float(wanted)).astype(parsed.dtype)
    for text in bad:
        with pytest.raises(SignatureError, match="a pad value must be one that"):
            parse_input("x", f"{kind}[length] = {text}")


def test_64_bit_types_are_taken_once_x64_is_on():
    jax.config.update("jax_enable_x64", True)
    try:
        assert parse_input("x", "int64[length] = 9223372036854775807").pad == 2**63 - 1
        assert parse_input("x", "float64[]").dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)


def test_axes_come_in_order_of_appearance():
    signature = Signature.parse(
        {"image": "uint8[height, width, 3]", "ids": "int32[length]", "m": "mask[width, height]"}
    )
    assert signature.axes == ("height", "width", "length")
    bucket = Bucket(("batch", *signature.axes), (2, 4, 6, 8))
    shapes = {name: (one.shape, one.dtype) for name, one in signature.abstract_at(bucket).items()}
    assert shapes == {
        "image": ((2, 4, 6, 3), np.uint8),
        "ids": ((2, 8), np.int32),
        "m": ((2, 6, 4), np.bool_),
    }


def test_lengths_have_one_number_a_row():
    signature = Signature.parse({"x": "float32[time, 80]", "n": "lengths[time]", "p": "positions[time]"})
    shapes = {name: one.shape for name, one in signature.abstract({"batch": 3, "time": 7}).items()}
    assert shapes == {"x": (3, 7, 80), "n": (3,), "p": (3, 7)}


@pytest.mark.parametrize(
    ("declarations", "message"),
    [
        ({}, "at least one input that the caller must send"),
        ({"m": "mask[length]"}, "at least one input that the caller must send"),
        ({"x": "int32[length]?"}, "at least one input that the caller must send"),
        ({"x": "int32[length]", "m": "mask[lenght]"}, r"'m' names \['lenght'\]"),
        ({"x": "int32[length]", "z": "int32[other]?"}, r"'z' names \['other'\]"),
    ],
)
def test_a_signature_is_refused_as_a_whole(declarations, message):
    with pytest.raises(SignatureError, match=message):
        Signature.parse(declarations)


def test_item_sizes_follow_the_axes():
    signature = Signature.parse({"a": "int32[w, h]", "b": "int32[]"})
    assert signature.item_sizes({"a": np.zeros((3, 5)), "b": np.zeros(())}) == (3, 5)
