"""The operations of a client as data: what is sent, and how the answer is read. No I/O."""

import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np

from ..errors import BadRequest
from .answers import Choice, Completion, Embeddings, Inference, Usage
from .errors import BadAnswer
from .tensors import decode_outputs, encode_input

T = TypeVar("T")
Headers = Mapping[str, str]
_JSON = {"content-type": "application/json"}
_HEAD_BYTES = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: status, headers by lower-case name, the whole body."""

    status: int
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Ask(Generic[T]):
    """One operation.

    Attributes:
        method: of HTTP.
        path: below the server's URL.
        read: makes the result of an answer; raises `BadAnswer`.
        body: makes headers and body, given the seconds that are left.
        streams: whether the answer is events.
        statuses: that are answers, beside those below 400.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    body: Callable[[float], tuple[Headers, bytes]] = field(default=lambda left_s: ({}, b""))
    streams: bool = False
    statuses: tuple[int, ...] = ()


def parsed(reply: Reply) -> Any:
    """The JSON of an answer; raises `BadAnswer` if it is none."""
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        raise BadAnswer(
            f"An answer must be JSON, got {reply.body[:200]!r}; check what listens at the URL."
        ) from None


def get(path: str) -> Ask[Any]:
    """A GET whose answer is JSON."""
    return Ask("GET", path, parsed)


def text(path: str) -> Ask[str]:
    """A GET whose answer is text."""
    return Ask("GET", path, lambda reply: reply.body.decode("utf-8", "replace"))


def probe(path: str) -> Ask[tuple[bool, Any]]:
    """A health probe: whether it says yes, and what else it says."""
    return Ask("GET", path, lambda reply: (reply.status == 200, parsed(reply)), statuses=(503,))


def model_path(name: str, version: str | None = None, rest: str = "") -> str:
    """The path of a model in the Open Inference Protocol."""
    middle = "" if version is None else f"/versions/{quote(version, safe='')}"
    return f"/v2/models/{quote(name, safe='')}{middle}{rest}"


def infer(
    model: str,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None,
    version: str | None,
    priority: int | None,
    parameters: Mapping[str, Any] | None,
) -> Ask[Inference]:
    """Tensors in, tensors out; both as raw bytes."""
    encoded = [encode_input(name, value) for name, value in inputs.items()]
    head: dict[str, Any] = {"inputs": [entry for entry, _ in encoded]}
    if outputs is not None:
        head["outputs"] = [{"name": name} for name in outputs]
    said = {"binary_data_output": True, **(parameters or {})}
    if priority is not None:
        said["priority"] = priority
    raw = [part for _, part in encoded]

    def body(left_s: float) -> tuple[Headers, bytes]:
        # What is left of the deadline goes along, so that the server does not work for nobody.
        timeout = {"timeout": max(1, int(left_s * 1e6))}
        text = json.dumps(head | {"parameters": timeout | said}).encode()
        headers = {"content-type": "application/octet-stream", _HEAD_BYTES: str(len(text))}
        return headers, b"".join([text, *raw])

    return Ask("POST", model_path(model, version, "/infer"), _inference, body)


def _inference(reply: Reply) -> Inference:
    length = reply.headers.get(_HEAD_BYTES, "")
    head, outputs = decode_outputs(reply.body, int(length) if length.isdecimal() else None)
    return Inference(
        outputs,
        str(head.get("model_name", "")),
        str(head.get("model_version", "")),
        reply.headers.get("x-request-id"),
        tuple(json.loads(head.get("parameters", {}).get("truncated", "[]"))),
    )


def _set(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def embed(
    inputs: str | Sequence[Any], model: str, dimensions: int | None, truncate: bool, side: str
) -> Ask[Embeddings]:
    """Texts or token ids in, vectors out, as base64."""
    given = inputs if isinstance(inputs, str) else [_plain(one) for one in inputs]
    body: dict[str, Any] = {"model": model, "input": given, "encoding_format": "base64"}
    body["dimensions"] = dimensions
    if truncate:
        body |= {"truncate": True, "truncate_side": side}
    raw = json.dumps(_set(body)).encode()
    return Ask("POST", "/v1/embeddings", _embeddings, lambda left_s: (_JSON, raw))


def _plain(one: Any) -> Any:
    return np.asarray(one).tolist() if isinstance(one, np.ndarray | np.generic) else one


def _embeddings(reply: Reply) -> Embeddings:
    tree = parsed(reply)
    try:
        rows = [np.frombuffer(binascii.a2b_base64(one["embedding"]), "<f4") for one in tree["data"]]
        vectors = np.stack(rows).astype(np.float32) if rows else np.zeros((0, 0), np.float32)
        tokens = tree["usage"]["prompt_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"An answer must hold embeddings in base64, got: {error!r}; check the URL.") from None
    return Embeddings(vectors, tokens, reply.headers.get("x-request-id"), tuple(tree.get("truncated", ())))


def generate(path: str, body: Mapping[str, Any], *, streams: bool) -> Ask[Completion]:
    """A completion or a chat; where it streams, nothing is read here."""
    said = _set(body)
    if not isinstance(said.get("prompt", ""), str):
        said["prompt"] = [_plain(one) for one in said["prompt"]]
    if streams:
        if said.get("n", 1) != 1:
            raise BadRequest(f"A stream has one choice, got n={said['n']!r}; ask for the others separately.")
        said |= {"stream": True, "stream_options": {"include_usage": True}}

    def encoded(left_s: float) -> tuple[Headers, bytes]:
        return _JSON, json.dumps({"timeout_s": left_s, **said}).encode()

    return Ask("POST", path, (lambda reply: Completion(())) if streams else _completion, encoded, streams)


def _completion(reply: Reply) -> Completion:
    tree = parsed(reply)
    try:
        choices = tuple(
            Choice(
                one["message"]["content"] if "message" in one else one["text"],
                one["finish_reason"],
                one.get("logprobs"),
            )
            for one in tree["choices"]
        )
        if not choices:
            raise ValueError("no choice")
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"An answer must be a completion, got: {error!r}; check the URL.") from None
    return Completion(choices, Usage.of(tree.get("usage")), reply.headers.get("x-request-id"))
