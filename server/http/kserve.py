"""Open Inference Protocol v2 over REST: infer and metadata, over any model behind the seam."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import BadRequest, BadTensor, ModelError, NotReady, ServerError, TooManyRows
from ..metrics import Metrics
from ..seam import Engine, ModelHandle, TensorSpec, find_model
from ..text import Cut, Embedder, Side
from .encode import cast, datatype_of, dumps
from .kserve_codec import Inputs, Tensor, check_parameters, decode, encode, flag, whole
from .kserve_schema import ModelMetadata, Parameters, RequestedOutput, TensorMetadata
from .wire import Call, Reply

TEXT = "text"
Rows = list[dict[str, np.ndarray]]


class Infer:
    """Handler of `POST /v2/models/{name}[/versions/{version}]/infer`.

    Args:
        engine: holds the models.
        texts: text fronts by model name; such a model also takes a BYTES input `text`.
        metrics: counts the inputs that were cut.
    """

    def __init__(self, engine: Engine, texts: Mapping[str, Embedder], metrics: Metrics) -> None:
        self._engine = engine
        self._texts = texts
        self._metrics = metrics

    async def __call__(self, call: Call) -> Reply:
        """Answers one call; raises `ServerError`."""
        inputs = decode(call)
        request = inputs.request
        model = find_model(self._engine, call.path["name"], call.path.get("version"))
        call.model = model.name
        binary = flag(request.parameters, "binary_data_output", False)
        wanted = wanted_outputs(model, request.outputs, binary)
        rows, cuts = await self._rows(model, inputs)
        self._metrics.cut(model.name, len(cuts))
        timeout_us = whole(request.parameters, "timeout")
        priority = whole(request.parameters, "priority")
        answers = (
            await model.submit(rows, priority=priority, timeout_s=timeout_us / 1e6 if timeout_us else None)
            if rows
            else []
        )
        head: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if request.id is not None:
            head["id"] = request.id
        if cuts:
            listed = [{"index": cut.at, "from": cut.before, "to": cut.after} for cut in cuts]
            head["parameters"] = {"truncated": dumps(listed).decode()}
        reply = encode(head, join(model, answers, len(rows)), wanted)
        if cuts:
            reply.headers.append((b"x-servax-truncated", b"%d" % len(cuts)))
        return reply

    async def _rows(self, model: ModelHandle, inputs: Inputs) -> tuple[Rows, list[Cut]]:
        front = self._texts.get(model.name)
        truncate, side = truncation(inputs.request.parameters, front)
        text = inputs.tensors.get(TEXT)
        if front is not None and isinstance(text, list) and len(inputs.tensors) == 1:
            check_text_shape(inputs.shapes[TEXT])
            check_row_count(model, len(text))
            prepared = await front.prepare(text, truncate=truncate, truncate_side=side)
            return [{front.input_name: ids} for ids in prepared.ids], prepared.cuts
        rows = split(model, inputs.tensors, front is not None)
        if front is None or not rows:
            return rows, []
        prepared = await front.prepare(
            [row[front.input_name] for row in rows], truncate=truncate, truncate_side=side
        )
        for row, ids in zip(rows, prepared.ids, strict=True):
            row[front.input_name] = ids
        return rows, prepared.cuts


def truncation(parameters: Parameters, front: Embedder | None) -> tuple[bool, Side]:
    """The `truncate` and `truncate_side` parameters; raises `BadRequest` where they mean nothing."""
    if front is None and ("truncate" in parameters or "truncate_side" in parameters):
        raise BadRequest("Truncating needs a model with a tokenizer, got one without; leave `truncate` out.")
    side = parameters.get("truncate_side", "right")
    if side == "right":
        return flag(parameters, "truncate", False), "right"
    if side == "left":
        return flag(parameters, "truncate", False), "left"
    raise BadRequest(f"Parameter 'truncate_side' is 'left' or 'right', got {side!r}; correct it.")


def wanted_outputs(
    model: ModelHandle, asked: Sequence[RequestedOutput] | None, binary: bool
) -> dict[str, bool]:
    """The outputs to send, and whether as raw bytes; all of them where none is asked for by name."""
    names = [spec.name for spec in model.outputs]
    if not asked:
        return dict.fromkeys(names, binary)
    for output in asked:
        check_parameters(output.parameters, "output")
        if output.name not in names:
            raise BadTensor(
                f"Outputs of {model.name!r} are {names}, got {output.name!r}; ask for one of them."
            )
    if len({output.name for output in asked}) != len(asked):
        raise BadTensor(f"An output is asked for once, got {[o.name for o in asked]}; leave the repeats out.")
    return {output.name: flag(output.parameters, "binary_data", binary) for output in asked}


def check_text_shape(shape: Sequence[int]) -> None:
    """Raises `BadTensor` unless texts are [n] or [n, 1]."""
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
        raise BadTensor(f"Input {TEXT!r} has shape [n] or [n, 1], got {list(shape)}; send one text a row.")


def check_row_count(model: ModelHandle, rows: int) -> None:
    """Raises `TooManyRows` before anything is made for each row."""
    if rows > model.max_request_rows:
        raise TooManyRows(
            f"A request to {model.name!r} has at most {model.max_request_rows} rows, got {rows}; "
            "send several requests."
        )


def split(model: ModelHandle, tensors: Mapping[str, Tensor], takes_text: bool) -> Rows:
    """Checks tensors against the model's specs, casts them, and cuts them into rows without a copy.

    Raises:
        BadTensor: an input is missing or unknown, or its datatype, rank or size is not the model's.
        TooManyRows: the leading dimension is above the model's limit.
    """
    specs = {spec.name: spec for spec in model.inputs}
    expected = f"{list(specs)} or {[TEXT]}" if takes_text else f"{list(specs)}"
    unknown = [name for name in tensors if name not in specs]
    if unknown:
        raise BadTensor(f"Inputs of {model.name!r} are {expected}, got {unknown[0]!r} too; leave it out.")
    for name in specs:
        if name not in tensors:
            raise BadTensor(f"Inputs of {model.name!r} are {expected}, got none named {name!r}; add it.")
    arrays = {name: _checked(spec, tensors[name]) for name, spec in specs.items()}
    counts = {name: len(array) for name, array in arrays.items()}
    rows = next(iter(counts.values()))
    if any(count != rows for count in counts.values()):
        raise BadTensor(f"Inputs share their leading dimension, got rows {counts}; send equally many.")
    check_row_count(model, rows)
    return [{name: array[row] for name, array in arrays.items()} for row in range(rows)]


def _checked(spec: TensorSpec, tensor: Tensor) -> np.ndarray:
    if isinstance(tensor, list):
        want = datatype_of(spec.dtype)
        raise BadTensor(f"Input {spec.name!r} of the model is {want}, got BYTES; send {want}.")
    shown = ["rows", *spec.shape]
    if tensor.ndim != 1 + len(spec.shape):
        raise BadTensor(f"Input {spec.name!r} has shape {shown}, got {list(tensor.shape)}; reshape it.")
    for size, axis in zip(tensor.shape[1:], spec.shape, strict=True):
        if isinstance(axis, int) and size != axis:
            raise BadTensor(f"Input {spec.name!r} has shape {shown}, got {list(tensor.shape)}; reshape it.")
        if isinstance(axis, str) and size == 0 and len(tensor):
            raise BadTensor(
                f"Input {spec.name!r} needs {axis} of at least 1, got {list(tensor.shape)}; send no rows"
                " if there is nothing to run."
            )
    return cast(tensor, spec.dtype, spec.name)


def join(model: ModelHandle, answers: Sequence[Mapping[str, np.ndarray]], rows: int) -> dict[str, np.ndarray]:
    """Stacks the rows' outputs; zero rows give empty arrays of the declared dtype and fixed sizes.

    Raises:
        BadTensor: rows of one output differ in shape, so that no tensor holds them.
        ModelError: the model did not answer each row.
    """
    if len(answers) != rows:
        raise ModelError(f"A model answers each row: expected {rows} rows, got {len(answers)}; report it.")
    joined: dict[str, np.ndarray] = {}
    for spec in model.outputs:
        if not rows:
            sizes = [size if isinstance(size, int) else 0 for size in spec.shape]
            joined[spec.name] = np.empty((0, *sizes), spec.dtype)
            continue
        parts = [answer[spec.name] for answer in answers]
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise BadTensor(
                f"Rows of one request give outputs of equal shape, got {sorted(shapes)} for {spec.name!r}; "
                "send rows of equal length, or one row a request."
            )
        joined[spec.name] = np.stack(parts)
    return joined


def error_body(call: Call, error: ServerError, status: Mapping[str, Any] | None = None) -> bytes:
    """An error of the protocol, with the request's id; `status` tells where warm-up stands."""
    body: dict[str, Any] = {"error": str(error), "reason": error.reason}
    if call.request_id is not None:
        body["id"] = call.request_id
    if isinstance(error, NotReady) and status is not None:
        body["status"] = status
    return dumps(body)


def model_metadata(model: ModelHandle, takes_text: bool) -> ModelMetadata:
    """Answer of `GET /v2/models/{name}`: the protocol's fields, and `limits` of the varying axes."""
    inputs = [_described(spec) for spec in model.inputs]
    if takes_text:
        instead = {"instead_of": ",".join(spec.name for spec in model.inputs)}
        inputs.append({"name": TEXT, "datatype": "BYTES", "shape": [-1], "parameters": instead})
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "jax_xla",
        "inputs": inputs,
        "outputs": [_described(spec) for spec in model.outputs],
        "limits": dict(model.limits),
        "max_request_rows": model.max_request_rows,
    }


def _described(spec: TensorSpec) -> TensorMetadata:
    shape = [-1, *(size if isinstance(size, int) else -1 for size in spec.shape)]
    return {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": shape}
