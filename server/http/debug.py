"""What people look at: the live page, the numbers behind it, why a shape takes which bucket, the options."""

import time
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI, Query, Request, Response

from ... import _version
from ...bucketing import BucketingError
from ..errors import BadRequest, UnknownModel
from ..explain import explain_model, grid_rows, program_rows
from ..metrics import Metrics
from ..seam import Engine, progress_text
from .encode import dumps
from .sampling import TextServer

# The page brings its own style and script and talks to nobody but this server.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
Options = Mapping[str, Mapping[str, Any]]


@cache
def _file(name: str) -> bytes:
    return resources.files(__package__).joinpath("static", name).read_bytes()


def _page(name: str) -> Response:
    return Response(_file(name), headers=_PAGE_HEADERS, media_type=f"{_FILES[name]}; charset=utf-8")


def add_debug(app: FastAPI, engine: Engine, metrics: Metrics, options: Options | None) -> None:
    """Add the live page and what it reads.

    Args:
        app: the application.
        engine: what is looked at.
        metrics: where the numbers come from.
        options: value and source by path of an option; None asks the engine, as made by code.
    """
    started_s = time.monotonic()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _page("page.html")

    @app.get("/debug/page.css", include_in_schema=False)
    async def style() -> Response:
        return _page("page.css")

    @app.get("/debug/page.js", include_in_schema=False)
    async def script() -> Response:
        return _page("page.js")

    @app.get("/debug/grid.json", tags=["operations"])
    async def grid() -> Response:
        """The state of the server and of every bucket, and the last two minutes second by second."""
        now_s = time.monotonic()
        return _json({"uptime_s": round(now_s - started_s, 1), **overview(engine, metrics, now_s)})

    @app.get("/debug/explain", tags=["operations"])
    async def explain(
        request: Request,
        model: str | None = Query(None, description="The model; may be left out where there is one."),
        rows: str = Query("1", description="Rows of the request."),
    ) -> Response:
        """Which bucket a request takes that comes alone, what others would cost, when batches leave.

        Sizes are given by axis name.
        """
        sizes = {
            key: _whole(key, value)
            for key, value in request.query_params.items()
            if key not in ("model", "rows")
        }
        found = engine.models[find_named(engine, model)]
        try:
            return _json(explain_model(found, _whole("rows", rows), sizes, metrics.recent.buckets()))
        except BucketingError as error:
            raise BadRequest(str(error)) from None

    @app.get("/v2/models/{name}/config", tags=["inference protocol v2"])
    async def config(name: str) -> Response:
        """The options in force, each with where it came from: default, file, env, flag or code."""
        return _json(effective(engine, find_named(engine, name), options))


def _json(body: Mapping[str, Any]) -> Response:
    return Response(dumps(body), media_type="application/json", headers={"cache-control": "no-store"})


def _whole(name: str, text: str) -> int:
    # Not int(): it takes signs, blanks, underscores and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest(f"{name} is a whole number, got {text[:50]!r}; send digits.")
    return int(text)


def find_named(engine: Engine, name: str | None) -> str:
    """The name of a served model, which may be left out where there is only one; raises `UnknownModel`."""
    if name is None and len(engine.models) == 1:
        return next(iter(engine.models))
    if name is None or name not in engine.models:
        served = ", ".join(sorted(engine.models)) or "none yet"
        raise UnknownModel(f"The model must be one that is served, got {name!r}; served: {served}.")
    return name


def effective(engine: Engine, name: str, options: Options | None) -> dict[str, Any]:
    """Body of the config endpoint."""
    model = engine.models[name]
    if options is None:
        values: Mapping[str, Any] = getattr(engine, "options", {})
        options = {path: {"value": value, "source": "code"} for path, value in values.items()}
    grid = getattr(model, "grid", None)
    fitted = getattr(model, "fitted", None) is not None
    # Of several models the option is not told apart by name, and stays as it was configured.
    if fitted and len(engine.models) == 1:
        options = {**options, "scheme": {"value": "fitted to traffic", "source": "re-fit"}}
    return {
        "name": name,
        "version": model.version,
        "limits": dict(model.limits),
        "max_request_rows": model.max_request_rows,
        "buckets": None if grid is None else [str(bucket) for bucket in grid],
        "rungs": None if grid is None else {axis: list(grid.rungs(axis)) for axis in grid.axes},
        "fitted": fitted,
        "generation": dict(model.options) if isinstance(model, TextServer) else None,
        "options": options,
    }


def overview(engine: Engine, metrics: Metrics, now_s: float) -> dict[str, Any]:
    """Body of `/debug/grid.json` but for the uptime."""
    totals = metrics.recent.buckets()
    models = []
    model: Any  # a fake one, or one without a grid, has less to show
    for name, model in engine.models.items():
        one: dict[str, Any] = {"name": name, "version": model.version, "ready": model.ready}
        if hasattr(model, "servable"):
            waiting, running = model.load()
            one |= {"waiting_rows": waiting, "running_rows": running}
            one |= {"axes": list(model.servable.grid.axes), "buckets": grid_rows(model, totals)}
        elif isinstance(model, TextServer):
            load = model.load()
            one |= {"waiting_rows": load["waiting"], "running_rows": load["running"]}
            one |= {"free_pages": load["free_pages"], "programs": program_rows(model, totals)}
        models.append(one)
    metrics.recent.waiting(now_s, sum(one.get("waiting_rows", 0) for one in models))
    return {
        "version": _version.__version__,
        "live": engine.live,
        "ready": engine.ready and not engine.draining,
        "progress": progress_text(engine),
        "status": engine.status(),
        "models": models,
        "series": metrics.recent.series(now_s),
        "events": metrics.events.listed()[-20:],
    }
