"""`POST /v1/embeddings`: every form of input, every refusal, cutting, and the public OpenAI client."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from servax.server.http.openai import EmbeddingResponse, ErrorResponse


@pytest.fixture(scope="module")
def client(live_site: tuple[Any, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_site[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("value", "rows", "tokens"),
    [
        ("a cat", [[4, 27, 1, 2]], 4),
        (["a cat"], [[4, 27, 1, 2]], 4),
        ([5], [[1, 5, 5, 5]], 1),
        ([[5, 6]], [[2, 11, 5, 6]], 2),
        (["a", "bb cc"], [[3, 14, 1, 2], [4, 27, 1, 2]], 7),
        (" ", [[2, 3, 1, 2]], 2),
        ("🦜 crème", [[4, 29, 1, 2]], 4),
    ],
)
def test_V8_all_forms_through_the_openai_client(
    client: openai.OpenAI, value: Any, rows: list[list[float]], tokens: int
) -> None:
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="toy", input=value, **encoding)
        got = [item.embedding for item in answer.data]
        if encoding.get("encoding_format") == "base64":
            got = [np.frombuffer(base64.b64decode(item), "<f4").tolist() for item in got]
        assert got == rows
        assert [item.index for item in answer.data] == list(range(len(rows)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
        assert answer.model == "toy"


def test_V8_base64_is_the_float_list(site: Any) -> None:
    numbers = site.embed(input="a cat").json()["data"][0]["embedding"]
    text = site.embed(input="a cat", encoding_format="base64").json()["data"][0]["embedding"]
    assert base64.b64decode(text) == np.array(numbers, "<f4").tobytes()


def test_V8_dimensions_cut_and_normalise_again(
    client: openai.OpenAI, site: Any, refused: Callable[..., str]
) -> None:
    vector = client.embeddings.create(model="toy", input=[[3, 4]], dimensions=3).data[0].embedding
    np.testing.assert_allclose(vector, np.array([2, 7, 3]) / np.linalg.norm([2, 7, 3]), rtol=1e-6)
    zero = site.embed(input=[[0]], dimensions=1).json()["data"][0]["embedding"]
    assert zero == [1.0]
    for dimensions in (0, -1, 5):
        response = site.embed(input="a", dimensions=dimensions)
        refused(response, 400, "bad_request", "1 to 4", str(dimensions))
        assert response.json()["error"]["param"] == "dimensions"
    response = site.embed(input="a " * 500, dimensions=3)
    refused(response, 400, "too_long", "got 502")
    assert response.json()["error"]["param"] == "input"


def test_V1_empty_list_is_an_empty_answer(site: Any) -> None:
    body = site.embed(input=[]).json()
    assert (body["data"], body["usage"]) == ([], {"prompt_tokens": 0, "total_tokens": 0})
    assert site.toy.calls == []


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [[]], [[5], []]])
def test_empty_inputs_are_refused_as_openai_refuses_them(client: openai.OpenAI, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="at least one") as caught:
        client.embeddings.create(model="toy", input=value)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "input")


def test_V7_ragged_token_lists_keep_their_order(site: Any) -> None:
    together = site.embed(input=[[270], [252, 7, 9]]).json()
    assert [item["embedding"] for item in together["data"]] == [[1, 270, 270, 270], [3, 268, 252, 9]]
    for row, ids in zip(together["data"], ([270], [252, 7, 9]), strict=True):
        assert site.embed(input=[ids]).json()["data"][0]["embedding"] == row["embedding"]


WORDS_14 = " ".join(["cat"] * 14)


@pytest.mark.parametrize(
    ("exact", "over"),
    [
        (WORDS_14, WORDS_14 + " cat"),
        ([WORDS_14], [WORDS_14 + " cat"]),
        ([7] * 16, [7] * 17),
        ([[7] * 16], [[7] * 17]),
    ],
)
def test_V3_the_limit_counts_special_tokens_in_every_form(
    site: Any, refused: Callable[..., str], exact: Any, over: Any
) -> None:
    answer = site.embed(input=exact)
    assert answer.json()["usage"]["prompt_tokens"] == 16
    assert "truncated" not in answer.json()
    refused(
        site.embed(input=over), 400, "too_long", "at most 16 tokens", "got 17 at index 0", "truncate=true"
    )
    cut = site.embed(input=over, truncate=True)
    assert cut.json()["truncated"] == [{"index": 0, "from": 17, "to": 16}]
    assert cut.headers["x-servax-truncated"] == "1"


def test_V3_a_huge_text_is_cut_off_the_event_loop(site: Any) -> None:
    answer = site.embed(input=["b", "cat " * 16_834], truncate=True).json()
    assert answer["truncated"] == [{"index": 1, "from": 16_836, "to": 16}]


def test_V4_truncation_says_so_and_keeps_the_side_asked_for(site: Any) -> None:
    ids = list(range(100, 400))
    for side, kept in (("right", [100, *range(101, 115), 399]), ("left", [100, *range(385, 399), 399])):
        before = site.metrics.value("servax_truncated_inputs_total", model="toy")
        answer = site.embed(input=[[5], ids], truncate=True, truncate_side=side)
        assert answer.json()["truncated"] == [{"index": 1, "from": 300, "to": 16}]
        assert answer.headers["x-servax-truncated"] == "1"
        assert site.toy.calls[-1][1]["ids"].tolist() == kept
        assert site.metrics.value("servax_truncated_inputs_total", model="toy") == before + 1


def test_truncation_through_the_openai_client(client: openai.OpenAI) -> None:
    raw = client.embeddings.with_raw_response.create(
        model="toy", input="cat " * 30, encoding_format="float", extra_body={"truncate": True}
    )
    assert raw.headers["x-servax-truncated"] == "1"
    assert raw.parse().usage.prompt_tokens == 16


def test_a_model_that_generates_is_pointed_to_completions(site: Any, refused: Callable[..., str]) -> None:
    site.ragged.inputs = ()
    words = ("'ragged', which generates text", "/v1/completions", "/v1/chat/completions")
    refused(site.embed(input="a", model="ragged"), 404, "unknown_model", *words)


@pytest.mark.parametrize(
    ("body", "status", "reason", "param", "words"),
    [
        ({"input": "a", "model": "no"}, 404, "unknown_model", "model", ("'no'", "toy")),
        ({"input": "a", "model": "double"}, 404, "unknown_model", "model", ("tokenizer", "/infer")),
        ({"input": "a", "dimension": 2}, 400, "bad_request", "dimension", ("unknown field", "dimension")),
        ({}, 400, "bad_request", "input", ("missing required field", "input")),
        ({"input": 3}, 400, "bad_request", "input", ("$.input",)),
        ({"input": [[1, "a"]]}, 400, "bad_request", "input", ("$.input",)),
        ({"input": [["a"]]}, 400, "bad_request", "input", ("$.input",)),
        ({"input": [1.5]}, 400, "bad_request", "input", ("$.input",)),
        ({"input": [True]}, 400, "bad_request", "input", ("$.input",)),
        ({"input": None}, 400, "bad_request", "input", ("$.input",)),
        ({"input": ["a", 5]}, 400, "bad_tensor", "input", ("one kind", "text and token id")),
        ({"input": [[5], "a"]}, 400, "bad_tensor", "input", ("one kind",)),
        ({"input": ""}, 400, "bad_tensor", "input", ("at least one character", "index 0", "leave it out")),
        ({"input": ["a", ""]}, 400, "bad_tensor", "input", ("at least one character", "index 1")),
        ({"input": [[]]}, 400, "bad_tensor", "input", ("at least one id", "index 0")),
        ({"input": [[5], []]}, 400, "bad_tensor", "input", ("at least one id", "index 1")),
        ({"input": [1000]}, 400, "bad_tensor", "input", ("0 to 999", "1000")),
        ({"input": [[5], [-1]]}, 400, "bad_tensor", "input", ("0 to 999", "-1", "index 1")),
        ({"input": [10**30]}, 400, "bad_tensor", "input", ("64 bits", str(10**30))),
        ({"input": ["a"] * 65}, 400, "too_many_rows", "input", ("at most 64", "65")),
        ({"input": "a", "encoding_format": "int8"}, 400, "bad_request", "encoding_format", ("int8",)),
        ({"input": "a", "dimensions": "2"}, 400, "bad_request", "dimensions", ("`int | null`",)),
        ({"input": "a", "truncate": 1}, 400, "bad_request", "truncate", ("`bool`",)),
        ({"input": "a", "truncate_side": "up"}, 400, "bad_request", "truncate_side", ("up",)),
        ({"input": "a", "user": 5}, 400, "bad_request", "user", ("`str | null`",)),
    ],
)
def test_refusals_name_rule_value_and_remedy(
    site: Any,
    refused: Callable[..., str],
    body: dict[str, Any],
    status: int,
    reason: str,
    param: str,
    words: tuple[str, ...],
) -> None:
    response = site.embed(**body)
    refused(response, status, reason, *words)
    error = msgspec.json.decode(response.content, type=ErrorResponse).error
    assert (error.param, error.type) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"model":"toy","input":"\xff"}',
        b"[" * 50_000,
        b'"' + b"\\" * 99,
    ],
)
def test_malformed_json(site: Any, refused: Callable[..., str], content: bytes) -> None:
    refused(site.call("POST", "/v1/embeddings", content=content), 400, "bad_request", "body must be")


def test_lone_surrogates_are_refused(site: Any, refused: Callable[..., str]) -> None:
    content = b'{"model":"toy","input":"\\ud800"}'
    refused(site.call("POST", "/v1/embeddings", content=content), 400, "bad_request")


def test_body_limits(site: Any, refused: Callable[..., str]) -> None:
    big = b'{"model":"toy","input":"' + b"a" * 200_000 + b'"}'
    response = site.call("POST", "/v1/embeddings", content=big)
    refused(response, 413, "payload_too_large", "at most 200000 bytes", str(len(big)))
    assert response.headers["connection"] == "close"

    async def chunks() -> Any:
        for _ in range(30):
            yield b" " * 10_000

    refused(site.call("POST", "/v1/embeddings", content=chunks()), 413, "payload_too_large", "200000")
    for plain in ("Identity", ""):
        response = site.call("POST", "/v1/embeddings", content=b"{}", headers={"content-encoding": plain})
        refused(response, 400, "bad_request", "model")
    response = site.call("POST", "/v1/embeddings", content=b"{}", headers={"content-encoding": "gzip"})
    refused(response, 400, "bad_request", "gzip")


def test_standard_fields_are_accepted(site: Any) -> None:
    answer = site.embed(input="a", user="someone", encoding_format=None, dimensions=None)
    assert msgspec.json.decode(answer.content, type=EmbeddingResponse).data[0].embedding == [3, 14, 1, 2]


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI, live_site: tuple[Any, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 16 tokens"):
        client.embeddings.create(model="toy", input="cat " * 30)
    with pytest.raises(openai.NotFoundError, match="'no'"):
        client.embeddings.create(model="no", input="cat")
    assert [model.id for model in client.models.list()] == sorted(live_site[0].engine.models)
    assert client.models.retrieve("toy").owned_by == "servax"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no")


def test_a_broken_model_is_a_500_that_says_so(site: Any) -> None:
    site.toy.run = lambda row: {"embedding": np.array([np.nan] * 4, np.float32)}
    response = site.embed(input="a")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "model")
    site.toy.run = lambda row: {}
    response = site.embed(input="a")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert "KeyError" not in response.text


def test_malformed_http_does_not_hurt(live_site: tuple[Any, str]) -> None:
    _, url = live_site
    with httpx.Client(base_url=url) as client:
        for content in (b"", b"\x00\x01"):
            assert client.post("/v1/embeddings", content=content).status_code == 400
        assert client.post("/v1/embeddings", json={"model": "toy", "input": "a"}).status_code == 200
