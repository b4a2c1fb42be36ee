"""Tensors of the Open Inference Protocol v2 to bytes and back, with its binary extension."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..datatypes import BFLOAT16, DATATYPES, datatype_of
from ..errors import BadTensor
from .errors import BadAnswer

Described = dict[str, Any]


def encode_input(name: str, value: Any) -> tuple[Described, bytes]:
    """One input as its JSON entry and its bytes.

    Args:
        name: of the input.
        value: an array `(rows, ...)`, or anything NumPy makes one of; texts go as BYTES.

    Raises:
        BadTensor: the protocol has no such dtype, or there is no leading dimension of rows.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of unequal length
        raise BadTensor(
            f"Input {name!r} must be an array, got: {error}; send a request for each row."
        ) from None
    if array.ndim < 1:
        raise BadTensor(f"Input {name!r} has rows in front, got a single value; add a dimension.")
    if array.dtype.kind in "USO":
        raw = b"".join(map(_text_bytes, array.reshape(-1).tolist()))
        datatype = "BYTES"
    else:
        datatype = datatype_of(array.dtype.newbyteorder("="))
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    entry: Described = {"name": name, "shape": list(array.shape), "datatype": datatype}
    return entry | {"parameters": {"binary_data_size": len(raw)}}, raw


def _text_bytes(text: object) -> bytes:
    if not isinstance(text, str | bytes):
        raise BadTensor(
            f"A tensor of objects holds texts, got {type(text).__name__}; give it a numeric dtype."
        )
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(4, "little") + raw


def decode_outputs(body: bytes, head_bytes: int | None) -> tuple[Described, dict[str, Any]]:
    """The JSON part of an answer, and its outputs by name.

    Args:
        body: the whole answer.
        head_bytes: bytes of its JSON part, by its header; None if all of it is JSON.

    Raises:
        BadAnswer: it is not an answer of the protocol.
    """
    end = len(body) if head_bytes is None else head_bytes
    try:
        head = json.loads(body[:end])
        outputs, at = {}, end
        for one in head["outputs"]:
            size = one.get("parameters", {}).get("binary_data_size")
            if size is None:
                outputs[one["name"]] = _from_json(one)
            else:
                outputs[one["name"]] = _from_bytes(one, memoryview(body)[at : at + size])
                at += size
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes belong to no output")
        return head, outputs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadAnswer(
            f"An answer must be one of the Open Inference Protocol v2, got {len(body)} bytes: {error!r}; "
            f"check what listens at the URL."
        ) from None


def _from_bytes(described: Mapping[str, Any], raw: memoryview) -> Any:
    if described["datatype"] == "BYTES":
        return _texts(raw, described["shape"])
    return np.frombuffer(raw, DATATYPES[described["datatype"]]).reshape(described["shape"])


def _from_json(described: Mapping[str, Any]) -> Any:
    if described["datatype"] == "BYTES":
        return np.array(described["data"], object).reshape(described["shape"])
    dtype = DATATYPES[described["datatype"]]
    values = np.array(described["data"], np.float32 if dtype == BFLOAT16 else dtype)
    return values.astype(dtype).reshape(described["shape"])


def _texts(raw: memoryview, shape: Sequence[int]) -> Any:
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        found.append(str(raw[at + 4 : at + 4 + size], "utf-8"))
        at += 4 + size
    return np.array(found, object).reshape(shape)
