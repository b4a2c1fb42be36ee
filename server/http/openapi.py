"""The OpenAPI schema: real bodies of the hot routes, generated from the structs that parse them."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .chat import ChatRequest
from .completions import CompletionRequest
from .generate import CHAT, COMPLETIONS, GENERATE, GENERATE_STREAM, GenerateRequest
from .kserve_schema import DocumentedRequest, InferError, InferResponse
from .openai import EmbeddingRequest, EmbeddingResponse, ErrorResponse

EMBEDDINGS = "/v1/embeddings"
INFER = "/v2/models/{name}/infer"
INFER_VERSION = "/v2/models/{name}/versions/{version}/infer"
_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    (COMPLETIONS, "create_completion", CompletionRequest, (_JSON, _EVENTS)),
    (CHAT, "create_chat_completion", ChatRequest, (_JSON, _EVENTS)),
    (GENERATE, "generate", GenerateRequest, (_JSON,)),
    (GENERATE_STREAM, "generate_stream", GenerateRequest, (_EVENTS,)),
)
_STATUSES = {
    "400": "A rule is broken; the message names the rule, the value and the remedy.",
    "401": "An API key is missing or wrong.",
    "404": "No such model or version.",
    "413": "The body is too large.",
    "429": "A queue is full; see Retry-After.",
    "500": "The model or the server failed on this request.",
    "503": "Starting or draining; see Retry-After.",
    "504": "The deadline passed.",
}


def install(app: FastAPI) -> None:
    """Makes `/openapi.json` describe the hot routes too."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def build(app: FastAPI) -> dict[str, Any]:
    """The whole schema of an application."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    types: list[Any] = [EmbeddingRequest, EmbeddingResponse, ErrorResponse]
    types += [DocumentedRequest, InferResponse, InferError]
    types += [kind for _, _, kind, _ in _TEXT]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, refs, strict=True))
    schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
    error, infer_error = by_type[ErrorResponse], by_type[InferError]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _own_errors(operation, infer_error if path.startswith("/v2") else error)
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
    schema["paths"][EMBEDDINGS] = {
        "post": _operation(
            "create_embeddings", "openai", by_type[EmbeddingRequest], by_type[EmbeddingResponse], error, ()
        )
    }
    for path, name, parameters in (
        (INFER, "infer", ("name",)),
        (INFER_VERSION, "infer_version", ("name", "version")),
    ):
        request, response = by_type[DocumentedRequest], by_type[InferResponse]
        operation = _operation(name, "inference protocol v2", request, response, infer_error, parameters)
        raw = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"]["content"]["application/octet-stream"] = raw
        operation["responses"]["200"]["content"]["application/octet-stream"] = raw
        operation["parameters"].append(
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "required": False,
                "description": "Bytes of the JSON part; the binary tensors follow it.",
                "schema": {"type": "integer", "minimum": 0},
            }
        )
        schema["paths"].setdefault(path, {})["post"] = operation
    for path, name, body, media in _TEXT:
        schema["paths"][path] = {
            "post": _text_operation(path, name, by_type[body], media, infer_error if "{" in path else error)
        }
    return schema


def _text_operation(
    path: str, name: str, body: dict[str, Any], media: tuple[str, ...], error: dict[str, Any]
) -> dict[str, Any]:
    named = "{name}" in path
    tag = "inference protocol v2" if named else "openai"
    operation = _operation(name, tag, body, {"type": "object"}, error, ("name",) if named else ())
    kinds = {_EVENTS: {"schema": {"type": "string"}}, _JSON: {"schema": {"type": "object"}}}
    operation["responses"]["200"]["content"] = {kind: kinds[kind] for kind in media}
    return operation


def _own_errors(operation: dict[str, Any], error: dict[str, Any]) -> None:
    """Errors as they really are; the framework's own 422 never goes out."""
    answers = operation["responses"]
    answers.pop("422", None)
    for status in ("400", "401", "404", "503"):
        answer = answers.setdefault(status, {})
        answer.setdefault("description", _STATUSES[status])
        if status != "503" or not answer.get("content"):
            answer["content"] = {"application/json": {"schema": error if status != "503" else {}}}


def _operation(
    name: str,
    tag: str,
    request: dict[str, Any],
    response: dict[str, Any],
    error: dict[str, Any],
    path_parameters: tuple[str, ...],
) -> dict[str, Any]:
    def content(body: dict[str, Any]) -> dict[str, Any]:
        return {"application/json": {"schema": body}}

    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content(response)}}
    for status, text in _STATUSES.items():
        answers[status] = {"description": text, "content": content(error)}
    return {
        "operationId": name,
        "tags": [tag],
        "parameters": [
            {"name": p, "in": "path", "required": True, "schema": {"type": "string"}} for p in path_parameters
        ],
        "requestBody": {"required": True, "content": content(request)},
        "responses": answers,
    }
