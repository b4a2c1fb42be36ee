"""The model-repository extension over REST, through tritonclient and by hand."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tritonclient.http as triton
from servax.server.errors import LoadFailed
from servax.server.fake import FakeEngine, doubler
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.repository import index
from tritonclient.utils import InferenceServerException

INDEX, LOAD = "/v2/repository/index", "/v2/repository/models/double/load"


class Loads:
    """Loads nothing, but says what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def __call__(self, name: str) -> None:
        self.asked.append(name)
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def loads() -> Loads:
    return Loads()


@pytest.fixture(scope="module")
def url(loads: Loads) -> Iterator[str]:
    app = create_app(FakeEngine(doubler(), doubler("ragged")), load=loads, api_keys=("k1",))
    with running(app) as url:
        yield url


@pytest.fixture
def client(url: str, loads: Loads) -> Iterator[triton.InferenceServerClient]:
    loads.asked.clear()
    loads.error = None
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    yield client
    client.close()


KEY = {"x-api-key": "k1"}


def test_tritonclient_reads_the_index(client: triton.InferenceServerClient) -> None:
    assert client.get_model_repository_index(headers=KEY) == [
        {"name": "double", "version": "1", "state": "READY", "reason": ""},
        {"name": "ragged", "version": "1", "state": "READY", "reason": ""},
    ]
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_repository_index()
    assert caught.value.status() == "401"


def test_states_and_reasons() -> None:
    engine = FakeEngine(doubler(), doubler("late"))
    engine.cool(3)
    engine.models["double"].ready = True
    first, second = index(engine)
    assert (first["state"], first["reason"]) == ("READY", "")
    assert second["state"] == "LOADING"
    assert "3 of 29 programs are warm" in second["reason"]
    assert index(engine, ready=True) == [first]
    engine.models["late"].lost = True  # as a model is whose covering program cannot be made
    assert index(engine)[1]["state"] == "UNAVAILABLE"
    assert "mend the model and restart" in index(engine)[1]["reason"]
    engine.draining = True
    assert {one["state"] for one in index(engine)} == {"UNAVAILABLE"}
    assert index(FakeEngine()) == []


def test_only_ready_ones_on_demand(site: Any, refused: Callable[..., str]) -> None:
    site.ragged.ready = False
    every, ready = site.call("POST", INDEX), site.call("POST", INDEX, json={"ready": True})
    assert {one["name"] for one in every.json()} - {one["name"] for one in ready.json()} == {"ragged"}
    for body in (b"[]", b"{", b'{"ready": 1}', b'{"redy": true}'):
        refused(site.call("POST", INDEX, content=body), 400, "bad_request", "/openapi.json")
    refused(site.call("POST", INDEX, content=b" " * 2_000_000), 413, "payload_too_large")


def test_nothing_is_changed_unless_the_server_was_told_to_allow_it(
    site: Any, refused: Callable[..., str]
) -> None:
    for name in ("double", "no"):
        path = LOAD.replace("double", name)
        refused(site.call("POST", path, json={}), 403, "forbidden", name, "--allow-load", "kill -HUP")
    refused(site.call("POST", LOAD.replace("load", "unload")), 403, "forbidden", "restart the server")


def test_tritonclient_has_a_model_loaded_anew(client: triton.InferenceServerClient, loads: Loads) -> None:
    client.load_model("double", headers=KEY)
    assert loads.asked == ["double"]
    loads.error = LoadFailed("'double' was not loaded anew, the old one stays: no file")
    with pytest.raises(InferenceServerException, match="the old one stays: no file") as caught:
        client.load_model("double", headers=KEY)
    assert caught.value.status() == "500"


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (lambda client: client.load_model("double"), "401", "API keys"),
        (lambda client: client.load_model("no", headers=KEY), "404", "served: double, ragged"),
        (lambda client: client.load_model("double", headers=KEY, config="{}"), "400", "without parameters"),
        (lambda client: client.unload_model("double", headers=KEY), "403", "restart the server"),
    ],
)
def test_what_is_refused_all_the_same(
    client: triton.InferenceServerClient, loads: Loads, call: Callable[[Any], None], status: str, said: str
) -> None:
    with pytest.raises(InferenceServerException, match=said) as caught:
        call(client)
    assert caught.value.status() == status
    assert loads.asked == []


def test_an_empty_body_will_do(url: str, loads: Loads) -> None:
    before = len(loads.asked)
    assert httpx.post(url + LOAD, headers=KEY).status_code == 200
    assert httpx.post(url + INDEX, headers=KEY).json()[0]["name"] == "double"
    assert len(loads.asked) == before + 1
