"""NumPy values to and from the wire: datatypes, casts that lose nothing in silence, fast JSON and base64."""

import binascii
import math
from array import array as c_array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import orjson

from ..datatypes import BFLOAT16 as BFLOAT16
from ..datatypes import DATATYPES as DATATYPES
from ..datatypes import all_finite as all_finite
from ..datatypes import datatype_of as datatype_of
from ..errors import BadTensor


def dumps(value: Any) -> bytes:
    """JSON bytes; contiguous NumPy arrays are written natively, without a Python loop.

    Measured on 64 vectors of 384 float32: 0.47 ms, against 0.63 ms for orjson over lists, 0.96 ms for
    msgspec over lists and 9.4 ms for the standard library; float32 stays short (303 kB, not 517 kB).
    """
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def base64_float32(vector: np.ndarray) -> str:
    """Base64 of the little-endian float32 bytes of a vector, as the OpenAI client decodes it."""
    return binascii.b2a_base64(np.ascontiguousarray(vector, "<f4").data, newline=False).decode("ascii")


def kind_of(dtype: np.dtype[Any]) -> str:
    """One of bool, int, float."""
    return "bool" if dtype.kind == "b" else "int" if dtype.kind in "iu" else "float"


def cast(array: np.ndarray, to: np.dtype[Any], name: str) -> np.ndarray:
    """Casts an input to the model's dtype where every value survives.

    Integers go to integers that hold them, floats to floats that do not overflow (precision may drop),
    integers to floats that hold them exactly. Everything else is refused.

    Raises:
        BadTensor: the kinds differ, or a value is out of range; both datatypes are named.
    """
    if array.dtype == to:
        return array
    kinds = (kind_of(array.dtype), kind_of(to))
    if kinds == ("float", "float"):
        with np.errstate(over="ignore", invalid="ignore"):
            narrowed = array.astype(to)
        if all_finite(narrowed):  # the usual case, without the words for the others
            return narrowed
    have, want = datatype_of(array.dtype), datatype_of(to)
    if kinds not in {("int", "int"), ("float", "float"), ("int", "float")}:
        raise BadTensor(f"Input {name!r} of the model is {want}, got {have}, another kind; send {want}.")
    if array.size == 0:
        return array.astype(to)
    if kinds == ("int", "int"):
        info = np.iinfo(to)
        wrong = next((v for v in (int(array.min()), int(array.max())) if not info.min <= v <= info.max), None)
        if wrong is not None:
            raise BadTensor(
                f"Input {name!r} of the model is {want} ({info.min} to {info.max}), got {have} value {wrong};"
                f" send values that fit {want}."
            )
        return array.astype(to)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(to)
        lost = (
            np.isinf(result) & np.isfinite(array)
            if kinds[0] == "float"
            else result.astype(array.dtype) != array
        )
    if lost.any():
        raise BadTensor(
            f"Input {name!r} of the model is {want}, which must hold each {have} value, got {array[lost][0]};"
            f" send values that fit {want}."
        )
    return result


def from_bytes(raw: bytes | memoryview, datatype: str, shape: Sequence[int], name: str) -> np.ndarray:
    """Little-endian, row-major values of a raw tensor; a read-only view of `raw`.

    Raises:
        BadTensor: the byte count does not match the shape.
    """
    dtype = DATATYPES[datatype]
    expected, got = math.prod(shape), len(raw)
    if got != expected * dtype.itemsize:
        raise BadTensor(_count_text(name, datatype, shape, expected, got // dtype.itemsize, got))
    return _reshaped(np.frombuffer(raw, dtype), shape, name)


def from_json(raw: bytes | memoryview, datatype: str, shape: Sequence[int], name: str) -> np.ndarray:
    """Values of a JSON array, flat or nested as the shape is.

    Raises:
        BadTensor: a value is of the wrong type or out of range, or the count does not match the shape.
    """
    dtype = DATATYPES[datatype]
    kind = kind_of(dtype)
    depth = _depth(raw, len(shape))
    data = _decoder(kind, depth).decode_checked(raw, name, datatype)
    if datatype == "FP32" and depth == 1 and 0 < len(data) == math.prod(shape):
        # The usual case in half of the time: an array rounds as NumPy does, without warnings to silence.
        narrow = np.frombuffer(c_array("f", data), dtype)
        if all_finite(narrow):
            return _reshaped(narrow, shape, name)
    try:
        wide = np.array(data, np.float64 if kind == "float" else dtype)
    except OverflowError:
        wide = np.array(data, object)
        info = np.iinfo(dtype)
        wrong = next(v for v in wide.flat if not info.min <= v <= info.max)
        raise BadTensor(
            f"Values of {datatype} input {name!r} are {info.min} to {info.max}, got {wrong}; "
            "send values in that range, or a wider datatype."
        ) from None
    except ValueError:
        raise BadTensor(
            f"Nested data of input {name!r} must be regular like its shape {list(shape)}, got rows of unequal"
            " length; send equal rows or flat data."
        ) from None
    expected = math.prod(shape)
    if wide.size != expected:
        got = wide.size
        raise BadTensor(_count_text(name, datatype, shape, expected, got, got * dtype.itemsize))
    if wide.ndim > 1 and wide.size and wide.shape != tuple(shape):
        raise BadTensor(
            f"Nested data of input {name!r} must have its shape {list(shape)}, got {list(wide.shape)}; "
            "nest it like the shape or send flat data."
        )
    return _reshaped(cast(wide, dtype, name), shape, name)


def _reshaped(array: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    try:
        return array.reshape(shape)
    except ValueError as error:  # too many dimensions, or sizes too large for an index
        raise BadTensor(f"Input {name!r} must have a possible shape, got: {error}; correct it.") from None


def _count_text(
    name: str, datatype: str, shape: Sequence[int], expected: int, got: int, got_bytes: int
) -> str:
    wanted = f"{expected} values / {expected * DATATYPES[datatype].itemsize} bytes"
    return (
        f"Input {name!r} of shape {list(shape)} and {datatype}: expected {wanted}, "
        f"got {got} / {got_bytes}; make data and shape agree."
    )


def strings_from_bytes(raw: bytes | memoryview, shape: Sequence[int], name: str) -> list[str]:
    """UTF-8 strings of a raw BYTES tensor: each preceded by its length as a little-endian uint32.

    Raises:
        BadTensor: lengths and bytes do not add up, the count is not the shape's, or it is no UTF-8.
    """
    view, found, at = memoryview(raw), [], 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "little")
        if at + 4 + size > len(view):
            raise BadTensor(
                f"A string of BYTES input {name!r} must end inside the data, got length {size} with "
                f"{max(0, len(view) - at - 4)} bytes left; check the uint32 length in front of each string."
            )
        found.append(bytes(view[at + 4 : at + 4 + size]))
        at += 4 + size
    _check_string_count(len(found), shape, name)
    try:
        return [item.decode("utf-8") for item in found]
    except UnicodeDecodeError as error:
        raise BadTensor(
            f"Strings of BYTES input {name!r} must be UTF-8, got {error}; encode them so."
        ) from None


def strings_from_json(raw: bytes | memoryview, shape: Sequence[int], name: str) -> list[str]:
    """Strings of a JSON array, flat or nested; raises `BadTensor` like `from_json`."""
    data = _decoder("str", _depth(raw, len(shape))).decode_checked(raw, name, "BYTES")
    while data and isinstance(data[0], list):
        data = [item for inner in data for item in inner]
    _check_string_count(len(data), shape, name)
    return data


def _check_string_count(got: int, shape: Sequence[int], name: str) -> None:
    expected = math.prod(shape)
    if got != expected:
        raise BadTensor(
            f"BYTES input {name!r} of shape {list(shape)} expected {expected} strings, got {got}; "
            "make data and shape agree."
        )


def _depth(raw: bytes | memoryview, rank: int) -> int:
    """Nesting to decode: 1 for flat data, else the shape's rank."""
    if rank < 2:
        return 1
    head = b"".join(bytes(raw[:64]).split())
    return rank if head.startswith(b"[[") else 1


class _ArrayDecoder:
    """Decodes a JSON array of one scalar type at one depth; the type check runs in C while parsing."""

    def __init__(self, kind: str, depth: int) -> None:
        item: Any = {"bool": bool, "int": int, "float": float, "str": str}[kind]
        for _ in range(depth):
            item = list[item]
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(item)

    def decode_checked(self, raw: bytes | memoryview, name: str, datatype: str) -> list[Any]:
        try:
            return self._decoder.decode(raw)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadTensor(
                f"Data of {datatype} input {name!r} must be an array of such values, got: {error}; change it."
            ) from None


@cache
def _decoder(kind: str, depth: int) -> _ArrayDecoder:
    return _ArrayDecoder(kind, depth)
