"""The model-repository extension over REST: `/v2/repository/...`."""

from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from .. import repository
from ..errors import BadRequest
from ..repository import Load, ModelIndex
from ..seam import Engine
from .kserve_schema import LoadRequest, RepositoryIndexRequest
from .wire import ClientGoneError, read_body

Body = TypeVar("Body", bound=msgspec.Struct)
_TAG = "inference protocol v2"
_BODY_BYTES = 1 << 20


def _documented(fields: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": schema}}}}


def add_repository(app: FastAPI, engine: Engine, permitted: Load | None) -> None:
    """Adds the routes.

    Args:
        app: the application.
        engine: holds the models.
        permitted: loads a model anew; None refuses to.
    """

    @app.post("/v2/repository/index", tags=[_TAG], openapi_extra=_documented({"ready": {"type": "boolean"}}))
    async def repository_index(request: Request) -> list[ModelIndex]:
        """Models and their states; with `ready` only those that can answer now."""
        asked = await _read(request, RepositoryIndexRequest)
        return repository.index(engine, ready=asked.ready)

    changes: dict[str, Any] = {
        "tags": [_TAG],
        "responses": {403: {"description": "What is served is not changed so."}},
        "openapi_extra": _documented({"parameters": {"type": "object"}}),
        "response_class": Response,
    }

    @app.post("/v2/repository/models/{name}/load", **changes)
    async def load_model(name: str, request: Request) -> Response:
        """Loads a model anew from where it came, if the server allows that (`allow_load`)."""
        asked = await _read(request, LoadRequest)
        await repository.load(engine, permitted, name, asked.parameters)
        return Response()

    @app.post("/v2/repository/models/{name}/unload", **changes)
    async def unload_model(name: str, request: Request) -> Response:
        """Refused: a model stays for as long as its server runs."""
        await _read(request, LoadRequest)
        repository.unload(name)
        return Response()


async def _read(request: Request, kind: type[Body]) -> Body:
    """The body, which may be missing."""
    try:
        raw = await read_body(dict(request.headers.raw), request.receive, _BODY_BYTES)
    except ClientGoneError:
        raise BadRequest("A request comes whole, got the beginning of one; send it again.") from None
    try:
        return msgspec.json.decode(raw, type=kind) if raw else kind()
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"A body must be what /openapi.json says, got: {error}; correct it.") from None
