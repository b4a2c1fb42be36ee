"""The OpenAPI schema of the routes for text."""

from typing import Any

import msgspec

from .chat import ChatRequest
from .completions import CompletionRequest
from .generate import CHAT, COMPLETIONS, GENERATE, GENERATE_STREAM, GenerateRequest

_STATUSES = {
    "400": "A rule is broken; the message names the rule, the value and the remedy.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "A queue is full; see Retry-After.",
    "500": "The model or the server failed on this request.",
    "503": "Starting or draining; see Retry-After.",
    "504": "The deadline passed.",
}
_ROUTES = (
    (COMPLETIONS, "create_completion", "openai", CompletionRequest),
    (CHAT, "create_chat_completion", "openai", ChatRequest),
    (GENERATE, "generate", "inference protocol v2", GenerateRequest),
    (GENERATE_STREAM, "generate_stream", "inference protocol v2", GenerateRequest),
)


def describe(schema: dict[str, Any]) -> None:
    """Add the routes for text, and the bodies that they parse, to an application's schema."""
    kinds = (CompletionRequest, ChatRequest, GenerateRequest)
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
    by_kind = dict(zip(kinds, refs, strict=True))
    for path, name, tag, kind in _ROUTES:
        schema["paths"][path] = {"post": _operation(path, name, tag, by_kind[kind])}


def _operation(path: str, name: str, tag: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if path != GENERATE_STREAM:
        answer["application/json"] = {"schema": {"type": "object"}}
    if path != GENERATE:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
        for status, text in _STATUSES.items()
    }
    return {
        "operationId": name,
        "tags": [tag],
        "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if "{name}" in path
        else [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": answer}, **errors},
    }
