"""Readiness, draining, disconnects, request ids, metrics, unknown paths and the schema."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from servax.server.cli.late import LateEngine
from servax.server.errors import DeadlineExceeded, ModelError, Overloaded
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.text import Embedder

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


def test_W3_probes_tell_how_far_warm_up_is(site: Any) -> None:
    site.engine.cool(3)
    assert site.call("GET", "/v2/health/live").status_code == 200
    ready = site.call("GET", "/v2/health/ready")
    assert (ready.status_code, ready.json()["done"], ready.json()["total"]) == (503, 3, 29)
    assert ready.headers["retry-after"] == "2"
    for response in (site.embed(input="a"), site.infer("double", X8)):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert "3 of 29" in response.text
        assert response.json()["status"]["state"] == "warming"
    assert site.embed(input="a").json()["error"]["code"] == "not_ready"
    assert site.infer("double", X8, id="q").json()["id"] == "q"
    assert site.call("GET", "/v2/models/double/ready").status_code == 503
    assert site.call("GET", "/v2/models/double").status_code == 200
    site.engine.heat()
    assert site.call("GET", "/v2/health/ready").status_code == 200
    assert site.call("GET", "/v2/models/double/ready").status_code == 200
    site.check_healthy()


def test_W3_the_metrics_tell_which_models_are_ready(site: Any) -> None:
    def ready(name: str) -> str:
        lines = site.call("GET", "/metrics").text.splitlines()
        return next(line[-3:] for line in lines if line.startswith(f'servax_model_ready{{model="{name}"}}'))

    site.engine.cool(3)
    assert ready("double") == "0.0"
    site.engine.heat()
    assert ready("double") == ready("toy") == "1.0"
    asyncio.run(site.engine.aclose(0.0))
    assert ready("double") == "0.0"


def test_warm_is_more_than_ready_and_open_to_all(site: Any) -> None:
    assert site.call("GET", "/v2/health/warm").status_code == 200
    site.engine.warm = False  # ready with the covering program alone, the others still to come
    assert site.call("GET", "/v2/health/warm").status_code == 503
    late = LateEngine()
    site.app = create_app(late, api_keys=["secret"])
    response = site.call("GET", "/v2/health/warm")
    assert (response.status_code, response.json()["state"]) == (503, "loading")


def test_a_dead_engine_is_not_live(site: Any) -> None:
    site.engine.live = False
    assert site.call("GET", "/v2/health/live").status_code == 503


def test_probes_answer_before_there_is_an_engine(site: Any) -> None:
    late = LateEngine()
    site.app = create_app(late, texts=late.texts, metrics=site.metrics)
    assert site.call("GET", "/v2/health/live").status_code == 200
    assert site.call("GET", "/v2/health/ready").json()["state"] == "loading"
    assert site.embed(input="a").status_code == 503
    assert site.call("GET", "/v1/models").json()["data"] == []
    from servax.server.fake import FakeTokenizer

    late.arrive(site.engine, {"toy": Embedder(site.toy, FakeTokenizer())})
    site.check_healthy()
    asyncio.run(late.aclose(1.5))
    assert site.engine.closed_after_s == 1.5
    assert site.call("GET", "/v2/health/ready").status_code == 503


def test_a_failed_load_is_neither_live_nor_ready(site: Any) -> None:
    late = LateEngine()
    late.fail(ValueError("no weights"))
    site.app = create_app(late, texts=late.texts, metrics=site.metrics)
    assert site.call("GET", "/v2/health/live").status_code == 503
    ready = site.call("GET", "/v2/health/ready")
    assert (ready.status_code, ready.json()["state"], ready.json()["error"]) == (503, "failed", "no weights")


def test_what_can_never_get_ready_is_not_to_be_retried(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.engine.cool(0)
    assert "0 of 29 programs are warm (warming); retry later" in site.infer("double", X8).text
    status = {"state": "failed", "done": 0, "total": 2, "failed": {"double 1": "no", "double 2": "no"}}
    monkeypatch.setattr(site.engine, "status", lambda: status)
    said = site.infer("double", X8).text
    assert "0 of 2 programs are warm, 2 failed (failed)" in said
    assert "mend the model and restart the server" in said
    assert "retry" not in said


def test_what_is_still_loading_says_so(site: Any) -> None:
    site.app = create_app(LateEngine(), texts={}, metrics=site.metrics)
    assert "the model is being loaded; retry later" in site.infer("double", X8).text
    assert site.call("GET", "/v2/health/ready").json()["message"] == "the model is being loaded"


def test_X4_a_draining_server_refuses_and_closes_the_connection(live_site: tuple[Any, str]) -> None:
    site, url = live_site
    site.engine.draining = True
    try:
        with httpx.Client(base_url=url) as client:
            assert client.get("/v2/health/ready").status_code == 503
            response = client.post("/v1/embeddings", json={"model": "toy", "input": "a"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "closed")
            assert response.headers["connection"] == "close"
            assert response.headers["retry-after"] == "2"
    finally:
        site.engine.draining = False
    site.check_healthy()


def test_X1_a_disconnect_frees_the_place_at_once(live_site: tuple[Any, str]) -> None:
    site, url = live_site
    host, port = url.removeprefix("http://").split(":")
    body = b'{"model":"toy","input":"a"}'
    before = site.requests(model="toy", route="embeddings", outcome="cancelled", reason="cancelled")
    site.toy.hold()
    try:
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert site.toy.entered.wait(10)
        assert site.toy.abandoned.wait(10)
    finally:
        site.toy.release()
    with httpx.Client(base_url=url) as client:
        assert client.post("/v1/embeddings", json={"model": "toy", "input": "a"}).status_code == 200
    after = site.requests(model="toy", route="embeddings", outcome="cancelled", reason="cancelled")
    assert after == before + 1


def test_X3_a_disconnect_while_the_body_is_read(live_site: tuple[Any, str]) -> None:
    site, url = live_site
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{")
    with httpx.Client(base_url=url) as client:
        assert client.post("/v2/models/double/infer", json={"inputs": [X8]}).status_code == 200
    assert site.engine.live


def test_errors_of_the_engine_keep_their_status(site: Any) -> None:
    site.double.error = Overloaded("At most 4 rows wait, got 5; retry.", retry_after_s=2.5)
    response = site.infer("double", X8)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    site.toy.error = Overloaded("At most 4 rows wait, got 5; retry.")
    assert site.embed(input="a").json()["error"]["type"] == "rate_limit_error"
    site.double.error = DeadlineExceeded("late")
    assert site.infer("double", X8).status_code == 504
    site.double.error = RuntimeError("secret detail")
    response = site.infer("double", X8)
    assert (response.status_code, response.json()["reason"]) == (500, "internal")
    assert "secret" not in response.text
    site.double.error = site.toy.error = None
    site.check_healthy()


def test_M1_requests_count_once_by_what_the_client_got(site: Any) -> None:
    site.infer("double", X8)
    site.infer("double", X8)
    site.double.error = ModelError("the model failed")
    site.infer("double", X8)
    site.infer("nobody", X8)
    labels = {"model": "double", "route": "infer"}
    assert site.requests(**labels, outcome="ok", reason="") == 2
    assert site.requests(**labels, outcome="error", reason="model") == 1
    assert site.requests(model="", route="infer", outcome="error", reason="unknown_model") == 1
    assert site.metrics.value("servax_request_seconds_count", **labels) == 3


def test_M3_M4_engine_metrics_are_exposed(site: Any) -> None:
    site.metrics.batch("toy", "batch=4,length=32", 3, 34, 128, 0.01, "full")
    site.metrics.compile("warmup", 0.5, "compiled")
    site.metrics.compile("warmup", 0.01, "store")
    site.metrics.watch_rows("toy", lambda: 7, lambda: 2)
    text = site.call("GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    for line in (
        'servax_batches_total{bucket="batch=4,length=32",model="toy",reason="full"} 1.0',
        'servax_batch_rows_total{bucket="batch=4,length=32",model="toy"} 3.0',
        'servax_batch_real_total{bucket="batch=4,length=32",model="toy"} 34.0',
        'servax_batch_computed_total{bucket="batch=4,length=32",model="toy"} 128.0',
        'servax_compiles_total{phase="warmup"} 1.0',
        'servax_compiles_total{phase="request"} 0.0',
        'servax_program_loads_total{phase="warmup",source="store"} 1.0',
        'servax_rows{model="toy",state="waiting"} 7.0',
        'servax_rows{model="toy",state="running"} 2.0',
    ):
        assert line in text.text


@pytest.mark.parametrize("path", ["/v2/health/live", "/v1/embeddings", "/nope", "/metrics"])
def test_request_ids_are_echoed_or_made(site: Any, path: str) -> None:
    assert site.call("GET", path, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = site.call("GET", path).headers["x-request-id"]
    assert len(made) == 32
    assert site.call("GET", path, headers={"x-request-id": "a" * 129}).headers["x-request-id"] != "a" * 129
    assert site.call("GET", path, headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_unknown_paths_and_methods(site: Any, refused: Callable[..., str]) -> None:
    refused(site.call("GET", "/v1/nope"), 404, "unknown_path", "/v1/nope")
    refused(site.call("GET", "/v2/nope"), 404, "unknown_path", "/v2/nope")
    refused(site.call("GET", "/v1/embeddings"), 405, "method_not_allowed", "takes POST, got GET")
    refused(site.call("DELETE", "/v2/models/double/infer"), 405, "method_not_allowed", "got DELETE")
    refused(site.call("GET", "/v2/models/no"), 404, "unknown_model", "'no'")
    refused(site.call("GET", "/v2/models/toy/versions/9"), 404, "unknown_model", "'toy (9)'")
    assert site.call("GET", "/v1/embeddings").headers["allow"] == "POST"


def test_the_schema_describes_the_hot_routes(site: Any) -> None:
    schema = site.call("GET", "/openapi.json").json()
    post = schema["paths"]["/v1/embeddings"]["post"]
    request = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
    fields = schema["components"]["schemas"][request]["properties"]
    assert {"model", "input", "encoding_format", "dimensions", "user", "truncate", "truncate_side"} == set(
        fields
    )
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        content = schema["paths"][path]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", "application/octet-stream"}
    references = [word for word in site.call("GET", "/openapi.json").text.split('"') if word.startswith("#/")]
    for reference in references:
        assert reference.rsplit("/", 1)[-1] in schema["components"]["schemas"]


def test_lifespan_runs_with_the_socket(site: Any) -> None:
    import contextlib
    from collections.abc import AsyncIterator

    seen: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        seen.append("start")
        yield
        seen.append("stop")

    with running(create_app(site.engine, lifespan=lifespan)) as url:
        assert httpx.get(f"{url}/v2/health/live").status_code == 200
        assert seen == ["start"]
    assert seen == ["start", "stop"]
