"""The HTTP application: routes, error bodies for everything else, request ids, the OpenAPI schema."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import _version
from ..config import HttpConfig
from ..errors import (
    BadRequest,
    MethodNotAllowed,
    NotReady,
    ServerError,
    Unavailable,
    UnknownModel,
    UnknownPath,
)
from ..metrics import Metrics
from ..repository import Load
from ..seam import Engine, find_model, progress_text
from ..text import Embedder
from ..tracing import Tracing
from . import kserve, kserve_schema, openai, openapi
from .debug import Options, add_debug
from .encode import dumps
from .entry import Entry, Keys
from .front import Application
from .gate import Gate
from .generate import generation_routes
from .hot import HotPaths
from .refusals import Refusals
from .repository import add_repository
from .traced import Traced
from .wire import Call, HotRoute, error_headers

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    engine: Engine,
    *,
    texts: Mapping[str, Embedder] | None = None,
    metrics: Metrics | None = None,
    config: HttpConfig | None = None,
    api_keys: Sequence[str] = (),
    settings: Options | None = None,
    lifespan: Lifespan | None = None,
    tracing: Tracing | None = None,
    load: Load | None = None,
) -> FastAPI:
    """Builds the HTTP application over an engine.

    Args:
        engine: holds the models; may still be warming up. Those that generate text, such as
            `servax.server.generation.GenerationServer`, answer the routes for text.
        texts: text fronts by model name; read at each request, so that it may be filled later.
        metrics: counts requests; the engine usually writes to the same object.
        config: limits of the front.
        api_keys: keys, one of which a request must bring, but for probes, metrics and the live page.
        settings: value and source of each option by its path, for `/v2/models/{name}/config`; None asks the
            engine for those that it was made with.
        lifespan: start and stop of what the application runs on.
        tracing: makes a span of each request; the same object that the engine has.
        load: loads a model anew when a client asks; None refuses to.

    Returns:
        An ASGI application, to be run by uvicorn or mounted.
    """
    texts = {} if texts is None else texts
    metrics = metrics or Metrics()
    metrics.ready_of = lambda: {
        name: one.ready and not engine.draining for name, one in engine.models.items()
    }
    config = config or HttpConfig()
    app = Application(title="servax", version=_version.__version__, lifespan=lifespan)
    app.router.redirect_slashes = False
    _add_hot_routes(app, engine, texts, metrics, config)
    _add_openai(app, engine)
    _add_kserve(app, engine, texts, config)
    add_repository(app, engine, load)
    add_debug(app, engine, metrics, settings)

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def read_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), headers={"content-type": metrics.content_type})

    app.add_exception_handler(HTTPException, _http_error)
    handler = _server_error(engine, config)
    app.add_exception_handler(ServerError, handler)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(Request(scope), scope["servax.error"])
        await response(scope, receive, send)

    hot = HotPaths(app.router.routes, lambda endpoint: isinstance(endpoint, HotRoute))
    passed: dict[str, Any] = {"keys": Keys(api_keys), "refuse": refuse, "client_header": config.client_header}
    app.add_middleware(Entry, hot=hot, **passed)
    front: ASGIApp = Entry(refuse, **passed)
    own: list[type] = [Entry]
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing)
        front = Traced(front, tracing=tracing)
        own.insert(0, Traced)
    app.go_past(front, hot, own)
    openapi.install(app)
    return app


def _add_hot_routes(
    app: FastAPI, engine: Engine, texts: Mapping[str, Embedder], metrics: Metrics, config: HttpConfig
) -> None:
    options: dict[str, Any] = {
        "metrics": metrics,
        "max_body_bytes": config.max_body_bytes,
        "retry_after_s": config.retry_after_s,
    }

    def openai_error(call: Call, error: ServerError) -> bytes:
        return openai.error_body(call, error, _progress(engine, error))

    def kserve_error(call: Call, error: ServerError) -> bytes:
        return kserve.error_body(call, error, _progress(engine, error))

    gate = options["gate"] = Gate(config.most_lag_s, metrics.unread)
    app.state.servax_refusals = Refusals(gate, kserve_error, openai_error)
    embeddings = HotRoute("embeddings", openai.Embeddings(engine, texts, metrics), openai_error, **options)
    infer = HotRoute("infer", kserve.Infer(engine, texts, metrics), kserve_error, **options)
    app.router.routes += [
        Route(openapi.EMBEDDINGS, embeddings, methods=["POST"]),
        Route(openapi.INFER, infer, methods=["POST"]),
        Route(openapi.INFER_VERSION, infer, methods=["POST"]),
        *generation_routes(engine, metrics=metrics, config=config),
    ]


def _progress(engine: Engine, error: ServerError) -> Mapping[str, Any] | None:
    return engine.status() if isinstance(error, NotReady) else None


def _add_openai(app: FastAPI, engine: Engine) -> None:
    created = int(time.time())

    @app.get("/v1/models", tags=["openai"])
    async def list_models() -> openai.ModelList:
        """Models that are served."""
        return openai.list_models(engine, created)

    @app.get("/v1/models/{name}", tags=["openai"])
    async def get_model(name: str) -> openai.ModelCard:
        """One served model."""
        return openai.model_card(find_listed(engine, name), created)


def find_listed(engine: Engine, name: str, version: str | None = None) -> str:
    """The name of a model that is known, ready or not; raises `UnknownModel`."""
    model = engine.models.get(name)
    if model is None or (version is not None and version != model.version):
        served = ", ".join(f"{m.name} ({m.version})" for m in engine.models.values()) or "none yet"
        asked = name if version is None else f"{name} ({version})"
        raise UnknownModel(f"The model must be one that is served, got {asked!r}; served: {served}.")
    return name


def _add_kserve(app: FastAPI, engine: Engine, texts: Mapping[str, Embedder], config: HttpConfig) -> None:
    @app.get("/v2", tags=["inference protocol v2"])
    async def server_metadata() -> kserve_schema.ServerMetadata:
        """Name, version and protocol extensions."""
        return {
            "name": "servax",
            "version": _version.__version__,
            "extensions": list(kserve.EXTENSIONS),
        }

    @app.get("/v2/health/live", tags=["inference protocol v2"], responses={503: {}})
    async def live() -> Response:
        """200 while the process can answer; 503 when it must be restarted."""
        if engine.live:
            return _health(True, {"live": True})
        return _health(False, {"live": False, "error": engine.status().get("error")})

    @app.get("/v2/health/ready", tags=["inference protocol v2"], responses={503: {}})
    async def ready() -> Response:
        """200 once every needed program is warm; 503 with the progress until then, and while draining."""
        body = _readiness(engine)
        return _health(engine.ready and not engine.draining, body, _advice_s(body, config))

    @app.get("/v2/health/warm", tags=["inference protocol v2"], responses={503: {}})
    async def warm() -> Response:
        """200 once every program is there, also those that readiness does not wait for; 503 until then."""
        status = engine.status()
        return _health(bool(status.get("warm")), status, _advice_s(status, config))

    @app.get("/v2/models/{name}", tags=["inference protocol v2"])
    @app.get("/v2/models/{name}/versions/{version}", tags=["inference protocol v2"])
    async def model_metadata(name: str, version: str | None = None) -> kserve_schema.ModelMetadata:
        """Tensors and limits of a model."""
        model = engine.models[find_listed(engine, name, version)]
        return kserve.model_metadata(model, name in texts)

    @app.get("/v2/models/{name}/ready", tags=["inference protocol v2"], responses={503: {}})
    @app.get(
        "/v2/models/{name}/versions/{version}/ready", tags=["inference protocol v2"], responses={503: {}}
    )
    async def model_ready(name: str, version: str | None = None) -> Response:
        """200 when the model answers; 503 with the progress until then."""
        try:
            find_model(engine, name, version)
        except UnknownModel:
            raise
        except ServerError as error:
            lasting = isinstance(error, Unavailable) and error.lasting
            return _health(False, _readiness(engine), 0.0 if lasting else config.retry_after_s)
        return _health(True, {"name": name, "ready": True})


def _readiness(engine: Engine) -> dict[str, Any]:
    status = engine.status()
    return {"ready": engine.ready and not engine.draining, "message": progress_text(engine), **status}


def _advice_s(status: Mapping[str, Any], config: HttpConfig) -> float:
    return 0.0 if status.get("state") == "failed" else config.retry_after_s


def _health(good: bool, body: Mapping[str, Any], retry_after_s: float = 0.0) -> Response:
    headers = {} if good or not retry_after_s else {"retry-after": str(max(1, round(retry_after_s)))}
    return Response(dumps(body), 200 if good else 503, headers=headers, media_type="application/json")


def _error_response(path: str, error: ServerError, status: Mapping[str, Any] | None, code: int) -> Response:
    call = Call({}, {})
    shape = kserve.error_body if path.startswith("/v2") else openai.error_body
    return Response(shape(call, error, status), code, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    said: ServerError
    if error.status_code == 404:
        said = UnknownPath(f"The path must be one of /openapi.json's, got {path!r}; correct it.")
    elif error.status_code == 405:
        takes = (error.headers or {}).get("Allow", "its own methods")
        said = MethodNotAllowed(f"{path!r} takes {takes}, got {request.method}; see /openapi.json.")
    else:
        said = BadRequest(f"A request must be well-formed, got: {error.detail}; see /openapi.json.")
    response = _error_response(path, said, None, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _server_error(engine: Engine, config: HttpConfig) -> Callable[[Request, Exception], Any]:
    async def handle(request: Request, error: Exception) -> Response:
        if not isinstance(error, ServerError):
            raise error
        response = _error_response(request.url.path, error, _progress(engine, error), error.http_status)
        for key, value in error_headers(error, config.retry_after_s):
            response.headers[key.decode()] = value.decode()
        return response

    return handle
