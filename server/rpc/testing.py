"""Run a gRPC server on a real socket in the calling process, and talk to it; for tests, ours and yours."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2

from ..http.encode import from_bytes
from .codec import FIELDS
from .messages import MESSAGES
from .service import listening

_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


@contextlib.contextmanager
def running_grpc(
    make: Callable[[], grpc.aio.Server], grace_s: float = 5.0, run: Callable[..., object] = asyncio.run
) -> Iterator[str]:
    """Serves on a free port of 127.0.0.1, on an event loop in a thread of its own.

    Args:
        make: builds the server, on that loop.
        grace_s: seconds that calls get to end.
        run: runs a coroutine on an event loop of its own.

    Yields:
        The address, such as `127.0.0.1:43210`.

    Raises:
        RuntimeError: the server did not listen within 30 seconds.
    """
    started = threading.Event()
    address: list[str] = []
    stops: list[Callable[[], object]] = []

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with listening(make(), "127.0.0.1", 0, grace_s) as port:
            address.append(f"127.0.0.1:{port}")
            stops.append(lambda: loop.call_soon_threadsafe(stop.set))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=run, args=(main(),), name="servax-grpc", daemon=True)
    thread.start()
    if not started.wait(30.0):
        raise RuntimeError("The server must listen within 30 s, got silence; read its log.")
    try:
        yield address[0]
    finally:
        stops[0]()
        thread.join(30.0)


def infer_request(
    model: str,
    inputs: Sequence[Mapping[str, Any]],
    *,
    parameters: Mapping[str, bool | int | float | str] | None = None,
    **fields: Any,
) -> Any:
    """A `ModelInferRequest` from inputs as REST has them.

    Args:
        model: name of the model.
        inputs: `name`, `shape`, `datatype` and `data` of each; bytes go raw, values typed.
        parameters: plain values.
        fields: other fields of the message, such as `id`.
    """
    request = MESSAGES["ModelInferRequest"](model_name=model, **fields)
    for one in inputs:
        entry = request.inputs.add(name=one["name"], shape=one["shape"], datatype=one["datatype"])
        if isinstance(one["data"], bytes):
            request.raw_input_contents.append(one["data"])
        elif one["data"]:
            values = [value.encode() if isinstance(value, str) else value for value in one["data"]]
            getattr(entry.contents, FIELDS[one["datatype"]]).extend(values)
    for name, value in (parameters or {}).items():
        setattr(request.parameters[name], _PARAMETERS[type(value)], value)
    return request


def output_of(answer: Any, name: str) -> np.ndarray:
    """One output of a `ModelInferResponse`; raises `ValueError` if it has none of that name."""
    at = [one.name for one in answer.outputs].index(name)
    found = answer.outputs[at]
    return from_bytes(answer.raw_output_contents[at], found.datatype, list(found.shape), name)


class Refusal:
    """An error as its client sees it.

    Attributes:
        code: name of the status code.
        message: the status message.
        reason: the error's reason, from the trailing metadata.
        pushback_ms: advice to gRPC's retry policy, or None.
        info: `google.rpc.ErrorInfo`.
        request_id: from `google.rpc.RequestInfo`, or "".
        retry_s: from `google.rpc.RetryInfo`, or 0.
    """

    def __init__(self, error: Any) -> None:
        self.code: str = error.code().name
        self.message: str = error.details()
        trailers = dict(error.trailing_metadata() or ())
        self.reason: str | None = trailers.get("servax-reason")
        self.pushback_ms: str | None = trailers.get("grpc-retry-pushback-ms")
        self.status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        self.info = error_details_pb2.ErrorInfo()
        request, retry = error_details_pb2.RequestInfo(), error_details_pb2.RetryInfo()
        for detail in self.status.details:
            for target in (self.info, request, retry):
                detail.Unpack(target)
        self.request_id: str = request.request_id
        self.retry_s: float = retry.retry_delay.ToTimedelta().total_seconds()
