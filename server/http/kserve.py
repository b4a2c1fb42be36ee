"""Open Inference Protocol v2 over REST: infer and metadata, over any model behind the seam."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..batching.pins import Pin, pinned
from ..errors import BadTensor, ModelError, NotReady, ServerError
from ..metrics import Metrics
from ..seam import Engine, ModelHandle, TensorSpec, find_model
from ..text import Embedder
from .encode import datatype_of, dumps
from .kserve_codec import check_parameters, decode, encode, flag, whole
from .kserve_schema import ModelMetadata, Parameters, RequestedOutput, TensorMetadata
from .rows import TEXT, rows_of
from .wire import Call, Reply

EXTENSIONS = ("binary_tensor_data", "model_repository")


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
        front = self._texts.get(model.name)
        rows, cuts = await rows_of(model, front, request.parameters, inputs.tensors, inputs.shapes)
        self._metrics.cut(model.name, len(cuts))
        timeout_s = call.left_s(whole(request.parameters, "timeout") / 1e6)
        priority = whole(request.parameters, "priority")
        with maybe_pinned(request.parameters) as pin:
            answers = await model.submit(rows, priority=priority, timeout_s=timeout_s) if rows else []
        head: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if request.id is not None:
            head["id"] = request.id
        if said := said_of(cuts, pin):
            head["parameters"] = said
        reply = encode(head, join(model, answers, len(rows)), wanted)
        if cuts:
            reply.headers.append((b"x-servax-truncated", b"%d" % len(cuts)))
        return reply


def maybe_pinned(parameters: Parameters) -> AbstractContextManager[Pin | None]:
    """Pins what is asked for inside, where the parameter `deterministic` is true."""
    return pinned() if flag(parameters, "deterministic", False) else nullcontext()


def said_of(cuts: Sequence[Any], pin: Pin | None) -> dict[str, str]:
    """Parameters of the reply: `truncated`, where inputs were cut, and `buckets`, where rows were pinned."""
    said = {}
    if cuts:
        said["truncated"] = dumps([{"index": c.at, "from": c.before, "to": c.after} for c in cuts]).decode()
    if pin is not None:
        said["buckets"] = dumps([str(bucket) for bucket in pin.buckets]).decode()
    return said


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
        if rows == 1:
            joined[spec.name] = answers[0][spec.name][None]  # np.stack takes 2.5 microseconds for it
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
