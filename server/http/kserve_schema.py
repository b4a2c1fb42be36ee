"""Bodies of the Open Inference Protocol v2 over REST, as they are on the wire."""

from typing import Any, NotRequired

import msgspec
from typing_extensions import TypedDict

Parameters = dict[str, str | int | float | bool]


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """One input: its values in `data`, or in the binary part with `parameters.binary_data_size`.

    `data` stays undecoded here: it is decoded once, in C, by the datatype it declares.
    """

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: Parameters = {}


class RequestedOutput(msgspec.Struct, forbid_unknown_fields=True):
    """One output that the caller wants; `parameters.binary_data` asks for raw bytes."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON part of an infer request.

    Known parameters: `priority`, `timeout` (microseconds), `binary_data_output`, `deterministic` (the same
    answer bit by bit at any load; the reply names the buckets), and, for models with a
    tokenizer, `truncate` and `truncate_side`.
    """

    inputs: list[InputTensor] = []
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: Parameters = {}


class OnlyId(msgspec.Struct):
    """The id alone, for errors about a request that does not parse otherwise."""

    id: str | None = None


class DocumentedTensor(msgspec.Struct):
    """A tensor in JSON, flat or nested, row-major."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | msgspec.UnsetType = msgspec.UNSET


class DocumentedRequest(msgspec.Struct, rename={"request_id": "id"}):
    """The JSON part of an infer request; `/v2/models/{name}` tells what a model takes."""

    inputs: list[DocumentedTensor]
    request_id: str | msgspec.UnsetType = msgspec.UNSET
    outputs: list[RequestedOutput] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | msgspec.UnsetType = msgspec.UNSET


class InferResponse(msgspec.Struct, rename={"request_id": "id"}):
    """The JSON part of an answer; binary outputs follow it, in the same order."""

    model_name: str
    model_version: str
    outputs: list[DocumentedTensor]
    request_id: str | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | msgspec.UnsetType = msgspec.UNSET


class InferError(msgspec.Struct, rename={"request_id": "id"}):
    """Body of every 4xx and 5xx answer under `/v2`: rule, value, remedy; `reason` is stable."""

    error: str
    reason: str
    request_id: str | msgspec.UnsetType = msgspec.UNSET


class RepositoryIndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an index request, which may be missing."""

    ready: bool = False


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to load or unload, which may be missing."""

    parameters: dict[str, Any] = {}


class ServerMetadata(TypedDict):
    """Who answers, and with which extensions."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """One tensor; -1 is a size that varies, and the first size is the rows."""

    name: str
    datatype: str
    shape: list[int]
    parameters: NotRequired[dict[str, str]]


class ModelMetadata(TypedDict):
    """A model's tensors; `limits` are the largest sizes of the axes that vary."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    limits: dict[str, int]
    max_request_rows: int
