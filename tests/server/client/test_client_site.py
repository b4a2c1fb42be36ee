"""The clients against the real HTTP application: in process, and over a socket with an API key."""

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import servax
from servax.server.client import AsyncClient, AsyncTextStream, Client
from servax.server.errors import (
    BadRequest,
    BadTensor,
    DeadlineExceeded,
    ModelError,
    Overloaded,
    TooLong,
    Unauthorized,
    UnknownModel,
)

Site = Any  # what conftest.py makes


@pytest.fixture
def client(live_site: Any) -> Any:
    site, url = live_site
    with Client(url, api_key=site.keys[0]) as client:
        yield client


def inside(site: Site, action: Any) -> Any:
    """Runs `action(client)` against the application in process."""

    async def go() -> Any:
        async with AsyncClient("http://servax", transport=httpx.ASGITransport(app=site.app)) as client:
            return await action(client)

    return asyncio.run(go())


def test_tensors_in_and_out(client: Client) -> None:
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    answer = client.infer("double", {"x": x}, request_id="mine")
    assert repr(answer).startswith("Inference({'y': 'float32[")
    np.testing.assert_array_equal(answer["y"], 2 * x)
    assert answer["n"].tolist() == [8, 8]
    assert (answer.model, answer.version, answer.request_id) == ("double", "1", "mine")
    assert set(client.infer("double", {"x": x}, outputs=["n"]).outputs) == {"n"}
    half = np.array([[0.5, 1.5]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(client.infer("bf16", {"x": half})["y"], half * 2)
    assert client.infer("double", {"x": x[:0]})["y"].shape == (0, 8)


def test_the_server_hears_of_priority_and_of_the_time_that_is_left(client: Client, live_site: Any) -> None:
    site, _ = live_site
    client.infer("double", {"x": np.ones((1, 8), np.float32)}, priority=2, timeout_s=7.0)
    priority, timeout_s = site.double.options[-1]
    assert priority == 2
    assert 6.0 < timeout_s <= 7.0


def test_texts_in_and_vectors_out(client: Client) -> None:
    one = client.embed("a cat", model="toy")
    assert one.vectors.dtype == np.float32
    assert one.vectors.tolist() == [[4.0, 27.0, 1.0, 2.0]]
    assert one.tokens == 4
    two = client.embed(["a cat", "two dogs"], model="toy", request_id="vectors")
    assert two.vectors.shape == (2, 4)
    assert two.request_id == "vectors"
    ids = client.embed([np.array([1, 11, 13, 2], np.int32)], model="toy")
    np.testing.assert_array_equal(ids.vectors, one.vectors)
    cut = client.embed("w " * 30, model="toy", truncate=True)
    assert cut.truncated == ({"index": 0, "from": 32, "to": 16},)
    assert client.infer("toy", {"text": ["a cat"]})["embedding"].tolist() == one.vectors.tolist()


def test_texts_come_whole_and_as_they_are_written(client: Client) -> None:
    whole = client.complete("hello", model="parrot", max_tokens=9)
    assert (whole.text, whole.finish_reason) == ("hello", "stop")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.cached_tokens) == (5, 5, 1)
    assert [one.text for one in client.complete(["a", "b"], model="parrot").choices] == ["a", "b"]
    ids = np.frombuffer(b"ids", np.uint8)
    assert client.complete(ids, model="parrot").text == "ids"
    assert [one.text for one in client.complete([ids, ids], model="parrot").choices] == ["ids", "ids"]
    messages = [{"role": "user", "content": "hey \u2028"}]
    assert client.chat(messages, model="parrot").text == "hey \u2028"
    with client.stream_chat(messages, model="parrot") as stream:
        assert list(stream) == ["h", "e", "y", " ", "\u2028"]
    assert (stream.text, stream.finish_reason) == ("hey \u2028", "stop")
    assert stream.usage is not None
    assert stream.usage.completion_tokens == len("hey \u2028")
    assert "".join(client.stream_complete("again", model="parrot")) == "again"


def test_a_stream_that_breaks_raises_what_the_server_said(client: Client) -> None:
    stream = client.stream_complete("failure", model="parrot", request_id="broken")
    with pytest.raises(ModelError, match="no more to say") as caught:
        list(stream)
    assert stream.text == "fail"
    assert caught.value.request_id == "broken"
    with pytest.raises(UnknownModel):
        client.stream_complete("x", model="nobody")
    with pytest.raises(BadRequest, match="one choice"):
        client.stream_complete("x", model="parrot", n=2)


def test_leaving_a_stream_ends_the_servers_work(client: Client, live_site: Any) -> None:
    site, _ = live_site
    site.parrot.left.clear()
    site.parrot.hold = True
    with client.stream_complete("hello", model="parrot") as stream:
        for delta in stream:
            assert delta == "h"
            break
    site.parrot.hold = False
    assert site.parrot.left.wait(10)


def test_errors_have_their_class_and_words(client: Client, live_site: Any) -> None:
    with pytest.raises(TooLong, match="at most 16"):
        client.embed("w " * 30, model="toy")
    with pytest.raises(UnknownModel, match="served"):
        client.infer("none", {"x": np.ones((1, 8), np.float32)})
    with pytest.raises(BadTensor, match="'x'"):
        client.infer("double", {"z": np.ones((1, 8), np.float32)})
    with pytest.raises(BadRequest, match="max_token"):
        client.complete("a", model="parrot", max_token=3)
    with Client(live_site[1], api_key="wrong") as stranger, pytest.raises(Unauthorized, match="API key"):
        stranger.models()


def test_health_and_what_is_served(client: Client) -> None:
    assert client.live()
    assert client.ready()
    assert client.status()["done"] == 29
    assert client.wait_ready(5.0)["state"] == "ready"
    assert client.server()["name"] == "servax"
    assert {"toy", "double", "bf16"} <= set(client.models())
    assert client.model("double")["inputs"][0]["name"] == "x"
    assert {one["name"] for one in client.grid()["models"]} >= {"toy", "double"}
    assert "servax_requests_total" in client.metrics()


def test_a_server_that_warms_is_not_ready_and_says_how_far_it_is(site: Site) -> None:
    site.engine.cool(3)

    async def go(client: AsyncClient) -> None:
        assert not await client.ready()
        assert (await client.status())["done"] == 3
        site.engine.heat()
        assert await client.wait_ready(5.0)

    inside(site, go)


def test_the_asynchronous_client_does_the_same(site: Site) -> None:
    async def go(client: AsyncClient) -> None:
        x = np.ones((1, 8), np.float32)
        answers = await asyncio.gather(*[client.infer("double", {"x": x * n}) for n in range(5)])
        assert [answer["y"][0, 0] for answer in answers] == [0, 2, 4, 6, 8]
        assert (await client.embed("a cat", model="toy")).tokens == 4
        assert (await client.complete("abc", model="parrot")).text == "abc"
        messages = [{"role": "user", "content": "hey"}]
        assert (await client.chat(messages, model="parrot")).text == "hey"
        stream = await client.stream_chat(messages, model="parrot")
        assert isinstance(stream, AsyncTextStream)
        assert [delta async for delta in stream] == ["h", "e", "y"]
        async with await client.stream_complete("hey", model="parrot") as stream:
            assert "".join([delta async for delta in stream]) == "hey"
        assert await client.live()
        assert (await client.server())["name"] == "servax"
        assert "toy" in await client.models()
        assert (await client.model("toy"))["name"] == "toy"
        assert (await client.grid())["ready"]
        assert "servax_" in await client.metrics()
        with pytest.raises(UnknownModel):
            await client.embed("a", model="none")

    inside(site, go)


def test_a_real_refusal_is_retried_by_its_advice(site: Site) -> None:
    from servax.server.client import ManualClock

    clock = ManualClock()
    site.double.error = Overloaded("the queue is full; got one more: wait", retry_after_s=4.0)
    heal = clock.sleep

    def sleep(seconds: float) -> None:
        heal(seconds)
        site.double.error = None

    clock.sleep = sleep  # type: ignore[method-assign]

    async def go() -> None:
        transport = httpx.ASGITransport(app=site.app)
        async with AsyncClient(
            "http://servax", transport=transport, clock=clock, jitter=lambda: 0.0
        ) as client:
            assert (await client.infer("double", {"x": np.ones((1, 8), np.float32)}))["y"][0, 0] == 2
            site.double.error = DeadlineExceeded("too late; got 1 s: allow more")
            with pytest.raises(DeadlineExceeded):
                await client.infer("double", {"x": np.ones((1, 8), np.float32)})

    asyncio.run(go())
    assert clock.slept == [4.0]


def test_the_client_is_found_at_the_top_and_brings_no_jax() -> None:
    assert servax.Client is Client
    assert servax.AsyncClient is AsyncClient
    code = (
        "import sys, servax; servax.Client('http://localhost:1').close();"
        "print([name for name in ('jax', 'fastapi', 'pydantic', 'msgspec') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_without_httpx_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['httpx'] = None; import servax; servax.Client"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'servax[client]'" in out.stderr
