"""The short way to hot routes answers as the long one does."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from servax.server.http import front
from servax.server.http.asgi import create_app
from servax.server.http.entry import Entry
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
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
    stack = site.app.middleware_stack
    stack.app = Noting(stack.app, ways)
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


def ways_of(site: Any, number: int = 12) -> list[str]:
    """Paths of requests that went through the whole of FastAPI, after the first."""
    site.check_healthy()
    entry = site.app.middleware_stack
    while not isinstance(entry, Entry):
        entry = getattr(entry, "app", None) or entry._app
    begun = entry.__class__.__call__
    inside: list[str] = []

    async def counted(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
        if self is entry:
            inside.append(scope["path"])
        await begun(self, scope, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entry, "__call__", counted)
        for _ in range(number):
            call(site.app, "POST", "/v2/models/double/infer", json={"inputs": [X8]})
    return inside


def test_without_an_owners_additions_requests_go_past(site: Any) -> None:
    assert ways_of(site) == []


def test_what_replaces_the_stack_stays_in_front(site: Any) -> None:
    """As OpenTelemetry's instrumentation of FastAPI does."""
    seen: list[str] = []
    plain = site.app.build_middleware_stack
    site.app.build_middleware_stack = lambda: ServerErrorMiddleware(app=Noting(plain(), seen))
    assert len(ways_of(site)) == 12
    assert len(seen) == 14
    site.app.build_middleware_stack = plain
    site.app.middleware_stack = plain()
    assert ways_of(site) == []


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
def test_what_wraps_the_call_of_applications_stays_in_front(
    site: Any, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """As agents of error trackers do."""
    seen: list[str] = []
    plain = kind.__call__  # type: ignore[operator]

    async def wrapped(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await plain(self, scope, receive, send)

    monkeypatch.setattr(kind, "__call__", wrapped)
    site.check_healthy()
    site.check_healthy()
    assert len(seen) == 4


def test_a_body_limit_of_the_application_holds(site: Any) -> None:
    if not hasattr(site.app, "max_body_size"):
        pytest.skip("this FastAPI has none")
    site.app.max_body_size = 10
    statuses = [
        call(site.app, "POST", "/v2/models/double/infer", json={"inputs": [X8]}).status_code for _ in "ab"
    ]
    assert statuses == [413, 413]


def test_middleware_of_the_framework_that_the_owner_adds_stays_in_front(site: Any) -> None:
    site.app.add_middleware(CORSMiddleware, allow_origins=["https://page"])
    for _ in range(3):
        answer = call(
            site.app,
            "POST",
            "/v2/models/double/infer",
            json={"inputs": [X8]},
            headers={"origin": "https://page"},
        )
        assert answer.headers["access-control-allow-origin"] == "https://page"


def test_keys_hold_on_every_way(site: Any) -> None:
    app = create_app(site.engine, api_keys=["right"])
    for key, status in [("right", 200), ("wrong", 401), ("right", 200), ("wrong", 401)]:
        headers = {"authorization": f"Bearer {key}"}
        answer = call(app, "POST", "/v2/models/double/infer", json={"inputs": [X8]}, headers=headers)
        assert answer.status_code == status
