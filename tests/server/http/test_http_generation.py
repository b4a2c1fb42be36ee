"""Routes for text over a small decoder with random weights, driven by the public `openai` client."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest
from servax import models
from servax.server.config import HttpConfig
from servax.server.generation import GenerationServer, SamplingParams
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.metrics import Metrics

MODEL = "tiny"


@pytest.fixture(scope="module")
def server():
    made = GenerationServer(
        models.tiny(max_tokens=256),
        name=MODEL,
        pages=130,
        page_size=8,
        max_rows=8,
        prefill_buckets=((8, 16),),
        mixed_buckets=(),
        decode_rows=(8,),
        max_logprobs=5,
    )
    with made as ready:
        yield ready


@pytest.fixture(scope="module")
def metrics():
    return Metrics()


@pytest.fixture(scope="module")
def app(server, metrics):
    return create_app(server, metrics=metrics, config=HttpConfig(max_body_bytes=200_000))


@pytest.fixture(scope="module")
def url(app):
    with running(app) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion_equals_the_python_api(client, server):
    out = client.completions.create(model=MODEL, prompt="Hello", max_tokens=12, temperature=0.0)
    expected = server.generate("Hello", SamplingParams(max_tokens=12, temperature=0.0))
    assert out.choices[0].text == expected.text
    assert out.choices[0].finish_reason == expected.finish_reason
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (5, len(expected.ids))
    assert out.model == MODEL


def test_completion_streams_with_usage(client, server):
    options = {"model": MODEL, "prompt": "Hi", "max_tokens": 30, "temperature": 0.0, "seed": 1}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streams_tell_their_time_to_the_first_token(client, metrics):
    labels = {"model": MODEL, "route": "completions"}
    before = metrics.value("servax_first_event_seconds_count", **labels)
    list(client.completions.create(model=MODEL, prompt="Hi", max_tokens=3, stream=True))
    assert metrics.value("servax_first_event_seconds_count", **labels) == before + 1


def test_prompts_and_choices(client):
    out = client.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=6, seed=5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in out.choices}) == 4
    again = client.completions.create(
        model=MODEL, prompt="b", n=2, max_tokens=6, seed=5, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in out.choices[2:]]
    assert out.usage.prompt_tokens == 2
    assert out.usage.completion_tokens == 24
    ids = client.completions.create(
        model=MODEL, prompt=[[68], [69]], max_tokens=3, temperature=0.0, logprobs=2
    )
    assert len(ids.choices) == 2
    assert len(ids.choices[0].logprobs.tokens) == 3
    assert len(ids.choices[0].logprobs.top_logprobs[0]) <= 2


def test_G9_a_seed_reproduces_on_each_route(client, url, server):
    params = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
    expected = server.generate("Hello", params).text
    extra = {"ignore_eos": True}
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 12, "seed": 7, "extra_body": extra}
    assert client.completions.create(**body).choices[0].text == expected
    assert "".join(c.choices[0].text for c in client.completions.create(**body, stream=True)) == expected
    parameters = {"max_tokens": 12, "seed": 7, "ignore_eos": True}
    body = {"text_input": "Hello", "parameters": parameters}
    out = httpx.post(f"{url}/v2/models/{MODEL}/generate", json=body).json()
    assert out == {"model_name": MODEL, "model_version": "1", "text_output": expected}
    text = ""
    with httpx.stream("POST", f"{url}/v2/models/{MODEL}/generate_stream", json=body) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        for line in events.iter_lines():
            if line:
                text += json.loads(line.removeprefix("data: "))["text_output"]
    assert text == expected


def test_chat_streams_by_the_openai_client(client, server):
    messages = [{"role": "user", "content": "Hi"}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0.0}
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    chunks = list(client.chat.completions.create(**options, stream=True, extra_body={"ignore_eos": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    prompt = server.model.tokenizer.encode_rendered([server.model.chat.render(messages)])[0]
    expected = server.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert text == expected.text
    assert whole.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("most", [{"max_completion_tokens": 0}, {"max_tokens": 0}])
def test_no_tokens_at_all_are_refused(client, most):
    with pytest.raises(openai.BadRequestError, match="max_tokens is at least 1; got 0"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], **most)


def test_chat_logprobs(client):
    out = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=2,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    content = out.choices[0].logprobs.content
    assert len(content) == 3
    for one in content:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == one.logprob
        # The vocabulary is of bytes: those above 127 are parts of characters, and no text by themselves.
        assert len(one.bytes) == 1
        assert bytes(one.bytes).decode(errors="replace") == one.token


@pytest.mark.parametrize("text", ["😀 naïve", "漢字かな", "a👩‍👩‍👧b"])
def test_emoji_and_cjk_split_over_tokens_stream_whole(client, server, monkeypatch, text):
    """The model writes bytes, so its own text shows broken characters; a spelled one shows whole ones."""
    tokens, stream = [3 + byte for byte in text.encode()], server.model.tokenizer.stream
    spelled = iter(tokens)

    class Spelling:
        """Takes the bytes of a text for whatever the model chose."""

        def __init__(self):
            self.inner = stream()

        def push(self, ids):
            return "".join(self.inner.push([next(spelled)]) for _ in ids)

        def flush(self):
            return self.inner.flush()

    monkeypatch.setattr(type(server.model.tokenizer), "stream", lambda *_, **__: Spelling())
    chunks = client.completions.create(
        model=MODEL, prompt="x", max_tokens=len(tokens), stream=True, extra_body={"ignore_eos": True}
    )
    seen = [chunk.choices[0].text for chunk in chunks]
    assert "".join(seen) == text
    assert "\ufffd" not in "".join(seen)


def test_G8_stop_strings_never_leak(client):
    options = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "temperature": 0.0}
    extra = {"extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options, **extra).choices[0].text
    stop = whole[9:12]
    chunks = list(client.completions.create(**options, **extra, stop=[stop], stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "served: tiny"),
        ({"temperature": -1}, 400, "temperature", "temperature is from 0 to 100"),
        ({"prompt": []}, 400, "prompt", "prompt is one text"),
        ({"prompt": ["a", 3]}, 400, "prompt", "one kind"),
        ({"prompt": [1, 2.5]}, 400, "prompt", "must be what this route takes"),
        ({"prompt": [999]}, 400, None, "token ids are 0 to 258"),
        ({"echo": True}, 400, "echo", "echo is not offered"),
        ({"best_of": 3}, 400, "best_of", "best_of equals n"),
        ({"n": 0}, 400, "n", "n is 1 to 128"),
        ({"colour": "red"}, 400, "colour", "unknown field"),
        ({"max_tokens": 10_000}, 400, None, "at most 256 tokens"),
        ({"logprobs": 6}, 400, None, "logprobs is at most 5"),
        ({"stream": True, "max_tokens": 10_000}, 400, None, "at most 256 tokens"),
    ],
)
def test_errors_name_rule_and_field(url, body, status, param, words):
    reply = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert words in error["message"]


def test_chat_errors(client):
    for messages in ([], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]):
        with pytest.raises(openai.BadRequestError, match=r"messages must be|must be of type text"):
            client.chat.completions.create(model=MODEL, messages=messages)


def test_an_error_in_the_middle_of_a_stream_is_an_event(client, server, url):
    step, count = server.engine.programs.step, iter(range(10_000))

    def poisoned(key, batch):
        out = step(key, batch)
        return out._replace(finite=np.zeros_like(out.finite)) if next(count) == 6 else out

    server.engine.programs.step = poisoned
    try:
        stream = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        with pytest.raises(openai.APIError, match="not finite"):
            list(stream)
    finally:
        server.engine.programs.step = step


def test_G11_a_disconnect_frees_slot_and_pages(url, server, metrics):
    before = metrics.value(
        "servax_requests_total", model=MODEL, route="completions", outcome="cancelled", reason="cancelled"
    )
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}

    async def leave():
        async with httpx.AsyncClient() as client:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as events:
                async for _ in events.aiter_lines():
                    return

    asyncio.run(leave())
    after = server.generate("x", SamplingParams(max_tokens=200, ignore_eos=True))
    assert len(after.ids) == 200
    assert server._desk.wait_idle(20)
    books = server.engine.books
    assert not books.running
    assert books.slots.free == books.slots.count
    assert books.cache.available == books.pool.size
    now = metrics.value(
        "servax_requests_total", model=MODEL, route="completions", outcome="cancelled", reason="cancelled"
    )
    assert now == before + 1


def test_32_clients_at_once(url, server):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(i):
                text = ""
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"question {i}"}],
                    max_tokens=12,
                    temperature=0.0,
                    stream=True,
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*map(one, range(32)))

    texts = asyncio.run(go())
    for i, text in enumerate(texts):
        messages = [{"role": "user", "content": f"question {i}"}]
        prompt = server.model.tokenizer.encode_rendered([server.model.chat.render(messages)])[0]
        assert text == server.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)).text


def test_the_schema_describes_the_bodies_that_are_parsed(app):
    schema = app.openapi()
    for path in ("/v1/completions", "/v1/chat/completions", "/v2/models/{name}/generate"):
        ref = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = schema["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]
        assert {"prompt", "messages", "text_input"} & set(fields)
