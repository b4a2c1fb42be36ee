"""Open Inference Protocol v2 over REST: from bytes to NumPy tensors and back, JSON or binary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..errors import BadRequest, BadTensor
from .encode import (
    BFLOAT16,
    DATATYPES,
    all_finite,
    datatype_of,
    dumps,
    from_bytes,
    from_json,
    strings_from_bytes,
    strings_from_json,
)
from .kserve_schema import InferRequest, InputTensor, OnlyId, Parameters
from .wire import MOST_DIGITS, Call, Reply

HEADER_LENGTH = b"inference-header-content-length"
_KNOWN = {
    "request": {
        *("priority", "timeout", "binary_data_output", "truncate", "truncate_side", "deterministic"),
    },
    "input": {"binary_data_size"},
    "output": {"binary_data"},
}
_decoder = msgspec.json.Decoder(InferRequest)
_id_decoder = msgspec.json.Decoder(OnlyId)

Tensor = np.ndarray | list[str]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A decoded request: its JSON part, and each input by name as an array or, for BYTES, strings."""

    request: InferRequest
    tensors: dict[str, Tensor]
    shapes: dict[str, list[int]]


def decode(call: Call) -> Inputs:
    """Splits and parses a request body.

    Raises:
        BadRequest: the JSON part is malformed or has an unknown field or parameter.
        BadTensor: an input's datatype, shape, data or byte count is wrong.
    """
    head, tail = _split(call)
    try:
        request = _decoder.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        call.request_id = _lenient_id(head)
        raise BadRequest(
            f"The JSON part must be an infer request of the Open Inference Protocol v2, got: {error}; "
            "see /openapi.json for its fields."
        ) from None
    call.request_id = request.id
    check_parameters(request.parameters, "request")
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    at = 0
    for tensor in request.inputs:
        if tensor.name in tensors:
            raise BadTensor(f"An input is sent once, got {tensor.name!r} twice; leave one out.")
        check_parameters(tensor.parameters, "input")
        size = _binary_size(tensor, len(tail) - at)
        raw = None if size is None else tail[at : at + size]
        at += size or 0
        tensors[tensor.name] = _values(tensor, raw)
        shapes[tensor.name] = tensor.shape
    if at != len(tail):
        raise BadTensor(
            f"Inputs must use all binary data, got {len(tail)} bytes of which binary_data_size claims {at}; "
            "make the sizes agree."
        )
    return Inputs(request, tensors, shapes)


def _split(call: Call) -> tuple[bytes | memoryview, memoryview]:
    declared = call.headers.get(HEADER_LENGTH)
    if declared is None:
        return call.body, memoryview(b"")
    size = int(declared) if declared.isdigit() and len(declared) <= MOST_DIGITS else len(call.body) + 1
    if size > len(call.body):
        raise BadRequest(
            f"Inference-Header-Content-Length is the bytes of the JSON part, 0 to {len(call.body)} here, "
            f"got {declared[:40].decode('latin-1')!r}; correct it."
        )
    view = memoryview(call.body)
    return view[:size], view[size:]


def _lenient_id(head: bytes | memoryview) -> str | None:
    try:
        return _id_decoder.decode(head).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def check_parameters(parameters: Parameters, where: str) -> None:
    """Raises `BadRequest` if a parameter is not one that is acted on; none is dropped in silence."""
    if parameters and (unknown := sorted(set(parameters) - _KNOWN[where])):
        raise BadRequest(
            f"Parameters of a {where} are {', '.join(sorted(_KNOWN[where]))}, got {unknown[0]!r}; drop it."
        )


def flag(parameters: Parameters, name: str, default: bool) -> bool:
    """A boolean parameter; raises `BadRequest` for another type."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"Parameter {name!r} is true or false, got {value!r}; correct it.")
    return value


def whole(parameters: Parameters, name: str) -> int:
    """A whole-number parameter, 0 when absent; raises `BadRequest` for another value."""
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"Parameter {name!r} is a whole number, 0 or more, got {value!r}; correct it.")
    return value


def _binary_size(tensor: InputTensor, left: int) -> int | None:
    if "binary_data_size" not in tensor.parameters:
        if not len(memoryview(tensor.data)):
            raise BadTensor(
                f"Input {tensor.name!r} needs data or parameters.binary_data_size, got neither; send one."
            )
        return None
    size = whole(tensor.parameters, "binary_data_size")
    if len(memoryview(tensor.data)):
        raise BadTensor(f"Input {tensor.name!r} has data or binary_data_size, got both; send one.")
    if size > left:
        raise BadTensor(
            f"Input {tensor.name!r} must lie inside the body, got binary_data_size {size} with {left} bytes "
            "left; correct it or Inference-Header-Content-Length."
        )
    return size


def _values(tensor: InputTensor, raw: memoryview | None) -> Tensor:
    name, shape, datatype, data = tensor.name, tensor.shape, tensor.datatype, memoryview(tensor.data)
    if min(shape, default=0) < 0:
        raise BadTensor(f"Sizes of input {name!r} are 0 or more, got {shape}; correct the shape.")
    if datatype == "BYTES":
        return strings_from_json(data, shape, name) if raw is None else strings_from_bytes(raw, shape, name)
    if datatype not in DATATYPES:
        known = ", ".join([*DATATYPES, "BYTES"])
        raise BadTensor(f"The datatype of input {name!r} is one of {known}, got {datatype!r}; convert it.")
    return from_json(data, datatype, shape, name) if raw is None else from_bytes(raw, datatype, shape, name)


def encode(head: dict[str, Any], outputs: Mapping[str, np.ndarray], wanted: Mapping[str, bool]) -> Reply:
    """Writes an answer.

    Args:
        head: model_name, model_version, and id and parameters where there are any.
        outputs: arrays with their leading row dimension, by name.
        wanted: the outputs to send, in this order, and whether each goes as raw bytes.

    Raises:
        BadRequest: an output asked for as JSON holds NaN or infinity, which JSON lacks.
    """
    described: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, binary in wanted.items():
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": array.shape}
        if binary:
            raw = np.ascontiguousarray(array).tobytes()
            entry["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            entry["data"] = _json_data(name, array)
        described.append(entry)
    text = dumps(head | {"outputs": described})
    if not tail:
        return Reply(text)
    headers = [(b"inference-header-content-length", b"%d" % len(text))]
    return Reply(b"".join([text, *tail]), b"application/octet-stream", headers=headers)


def _json_data(name: str, array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype == BFLOAT16:
        flat = flat.astype(np.float32)
    if flat.dtype.kind == "f" and not all_finite(flat):
        raise BadRequest(
            f"JSON holds finite numbers, got NaN or infinity in output {name!r}; ask for binary_data, or "
            "find the cause: ids beyond the model's table (jnp.take answers NaN), or the model itself. A "
            "server with --check-outputs refuses answers with NaN."
        )
    return flat
