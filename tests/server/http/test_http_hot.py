"""The short way to hot routes answers as the long one does."""

import asyncio
from typing import Any

import httpx
import pytest
from servax.server.http import front
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


class Noting:
    """Middleware of the application's owner."""

    def __init__(self, app: ASGIApp, seen: list[str]) -> None:
        self._app, self._seen = app, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._seen.append(scope["path"])
        await self._app(scope, receive, send)


def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def test_middleware_of_the_owner_stays_in_front(site: Any) -> None:
    seen: list[str] = []
    site.app.add_middleware(Noting, seen=seen)
    site.check_healthy()
    assert seen == ["/v1/embeddings", "/v2/models/double/infer"]


def test_a_mounted_application_finds_its_routes(site: Any) -> None:
    whole = Starlette(routes=[Mount("/models", app=site.app)])
    answer = call(whole, "POST", "/models/v2/models/double/infer", json={"inputs": [X8]})
    assert answer.json()["outputs"][0]["data"] == [3.0] * 8


@pytest.mark.parametrize("path", ["/v2/models/double/infer", "/v1/embeddings"])
def test_other_methods_are_told_so(site: Any, path: str) -> None:
    assert call(site.app, "GET", path).status_code == 405
    assert call(site.app, "POST", f"{path}/").status_code == 404


def test_parameters_of_the_path_arrive(site: Any) -> None:
    version = site.double.version
    good = call(site.app, "POST", f"/v2/models/double/versions/{version}/infer", json={"inputs": [X8]})
    assert good.json()["model_version"] == version
    assert (
        call(site.app, "POST", "/v2/models/double/versions/99/infer", json={"inputs": [X8]}).status_code
        == 404
    )
    spaced = call(site.app, "POST", "/v2/models/no%20such/infer", json={"inputs": [X8]})
    assert "'no such'" in spaced.json()["error"]
    assert site.requests(model="", route="infer", outcome="error", reason="unknown_model") == 2


def test_fastapis_own_tracing_sees_each_request_once_it_is_noticed(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "_LOOKS_EVERY", 10)
    for _ in range(12):  # most go past FastAPI, some all the way, to notice
        call(site.app, "POST", "/v2/models/double/infer", json={"inputs": [X8]})
    ways: list[str] = []
    site.app.middleware_stack = Noting(site.app.middleware_stack, ways)
    for _ in range(10):
        call(site.app, "POST", "/v2/models/double/infer", json={"inputs": [X8]})
    assert len(ways) == 1

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        await site.app({**scope, "fastapi.telemetry": None}, receive, send)

    for _ in range(10):
        call(traced, "POST", "/v2/models/double/infer", json={"inputs": [X8]})
    ways.clear()
    for _ in range(5):
        site.check_healthy()
    assert len(ways) == 10
