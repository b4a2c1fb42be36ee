"""A model that generates text among others: lists, metadata, probes, keys, limits, what it refuses."""

import asyncio

import httpx
import pytest
from servax import models
from servax.server.config import HttpConfig
from servax.server.fake import counting_embedder
from servax.server.fleet import Fleet
from servax.server.generation import GenerationServer
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics

CHAT = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "writer", "prompt": "Hi"}


class Site:
    """A server that was never started, so that nothing is compiled, behind the real application."""

    def __init__(self, **options):
        self.server = GenerationServer(models.tiny(), name="writer", max_rows=2)
        self.metrics = Metrics()
        self.app = create_app(self.server, metrics=self.metrics, **options)

    def call(self, method, path, **options):
        async def go():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())


@pytest.fixture(scope="module")
def site():
    return Site(config=HttpConfig(max_body_bytes=1000))


def test_it_is_listed_and_described(site):
    assert [one["id"] for one in site.call("GET", "/v1/models").json()["data"]] == ["writer"]
    assert site.call("GET", "/v1/models/writer").json()["id"] == "writer"
    about = site.call("GET", "/v2/models/writer").json()
    assert (about["inputs"], about["outputs"]) == ([], [])
    assert about["limits"] == {"tokens": 512, "batch": 2}
    force = site.call("GET", "/v2/models/writer/config").json()
    assert force["generation"]["max_rows"] == 2
    assert "decode 2x1" in force["generation"]["programs"]
    seen = site.call("GET", "/debug/grid.json").json()["models"]
    assert (seen[0]["name"], seen[0]["running_rows"]) == ("writer", 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {**TEXT, "stream": True}),
        ("/v2/models/writer/generate", {"text_input": "Hi"}),
        ("/v2/models/writer/generate_stream", {"text_input": "Hi"}),
    ],
)
def test_W3_before_it_is_warm_each_route_says_where_it_stands(site, path, body):
    answer = site.call("POST", path, json=body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert "0 of" in answer.text
    assert answer.json()["status"]["total"] > 5
    assert site.call("GET", "/v2/health/live").status_code == 200
    assert site.call("GET", "/v2/health/ready").status_code == 503
    assert site.call("GET", "/v2/models/writer/ready").status_code == 503


def test_bodies_are_bounded(site):
    answer = site.call("POST", "/v1/completions", json={**TEXT, "prompt": "x" * 2000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_X4_a_closed_server_refuses_and_closes_the_connection():
    site = Site()
    site.server.close()
    answer = site.call("POST", "/v1/completions", json=TEXT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closed")
    assert answer.headers["connection"] == "close"


def test_keys_are_asked_for():
    site = Site(api_keys=["secret"])
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert site.call("POST", path, json=body).status_code == 401
        answer = site.call("POST", path, json=body, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 503
    assert site.call("POST", "/v2/models/writer/generate", json={"text_input": "x"}).status_code == 401


class Ready(GenerationServer):
    """Says that it is ready, though nothing was compiled."""

    ready = True


def test_each_model_names_the_routes_that_it_has():
    class Mixed:
        """An engine of a fake model and a language model."""

        def __init__(self):
            self.models = {"toy": counting_embedder(), "writer": Ready(models.tiny(), name="writer")}
            self.live, self.ready, self.draining = True, True, False

        def status(self):
            return {"state": "ready", "done": 1, "total": 1}

    site = Site()
    site.app = create_app(Mixed())
    for path, body, words in (
        ("/v1/completions", {**TEXT, "model": "toy"}, "one that generates text, got 'toy'; served: writer"),
        ("/v1/completions", {**TEXT, "model": "none"}, "served: toy, writer"),
        ("/v2/models/toy/generate", {"text_input": "x"}, "served: writer"),
        ("/v1/embeddings", {"model": "writer", "input": "x"}, "send the prompt to /v1/completions"),
    ):
        answer = site.call("POST", path, json=body)
        assert answer.status_code == 404, answer.text
        assert words in answer.text
    for inputs in ([], [{"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}]):
        answer = site.call("POST", "/v2/models/writer/infer", json={"inputs": inputs})
        assert answer.status_code == 400
        assert "/v2/models/writer/generate" in answer.json()["error"]


def test_a_fleet_of_one_is_like_its_server():
    site = Site()
    site.app = create_app(Fleet(site.server))
    assert [one["id"] for one in site.call("GET", "/v1/models").json()["data"]] == ["writer"]
    assert site.call("POST", "/v1/completions", json=TEXT).status_code == 503


def test_the_schema_has_the_routes_and_their_bodies(site):
    schema = site.call("GET", "/openapi.json").json()
    for path, field, media in (
        ("/v1/completions", "prompt", {"application/json", "text/event-stream"}),
        ("/v1/chat/completions", "messages", {"application/json", "text/event-stream"}),
        ("/v2/models/{name}/generate", "text_input", {"application/json"}),
        ("/v2/models/{name}/generate_stream", "text_input", {"text/event-stream"}),
    ):
        operation = schema["paths"][path]["post"]
        ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert field in schema["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]
        assert set(operation["responses"]["200"]["content"]) == media
        assert {"400", "401", "404", "413", "429", "500", "503", "504"} <= set(operation["responses"])
