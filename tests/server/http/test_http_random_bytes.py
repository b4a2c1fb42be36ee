"""No bytes on the POST routes give a 5xx or hurt the next request."""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=int(os.environ.get("SERVAX_FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PATHS = ("/v1/embeddings", "/v2/models/double/infer", "/v2/models/toy/infer", "/v2/models/bf16/infer")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
embedding_fields = st.fixed_dictionaries(
    {"model": st.sampled_from(["toy", "double", "no"]) | values},
    optional={
        "input": values,
        "encoding_format": st.sampled_from(["float", "base64"]) | values,
        "dimensions": st.integers(-2, 6) | values,
        "truncate": st.booleans() | values,
        "truncate_side": st.sampled_from(["left", "right"]) | values,
        "user": values,
    },
)
datatypes = st.sampled_from(["BOOL", "INT8", "UINT64", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES", "?"])
parameters = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "timeout", "priority", "truncate", "odd"]),
    scalars,
    max_size=2,
)
tensors = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "ids", "text", "w"])},
    optional={
        "shape": st.lists(st.integers(-1, 9), max_size=3) | values,
        "datatype": datatypes,
        "data": st.lists(scalars, max_size=16) | st.lists(st.integers(0, 5), min_size=8, max_size=8) | values,
        "parameters": parameters,
    },
)
infer_fields = st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=3) | values},
    optional={"id": st.text(max_size=3) | values, "outputs": values, "parameters": parameters | values},
)


class Live:
    """A site over a real socket, on one connection."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def status(self, path: str, content: bytes, headers: dict[str, str] | None = None) -> int:
        return self.client.post(path, content=content, headers=headers).status_code

    def check_healthy(self) -> None:
        good = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
        answer = self.client.post("/v2/models/double/infer", json={"inputs": [good]})
        assert answer.json()["outputs"][0]["data"] == [3.0] * 8


@pytest.fixture(scope="module")
def live(live_site: tuple[Any, str]) -> Iterator[Live]:
    with httpx.Client(base_url=live_site[1], timeout=60) as client:
        yield Live(client)


@pytest.mark.parametrize("path", PATHS)
@given(content=st.binary(max_size=200))
@SETTINGS
def test_random_bytes(live: Live, path: str, content: bytes) -> None:
    assert live.status(path, content) < 500


@given(body=embedding_fields)
@SETTINGS
def test_random_embedding_bodies(live: Live, body: dict[str, Any]) -> None:
    assert live.status("/v1/embeddings", json.dumps(body).encode()) < 500
    live.check_healthy()


@pytest.mark.parametrize("path", PATHS[1:])
@given(body=infer_fields, tail=st.binary(max_size=64), claimed=st.integers(-2, 2) | st.none())
@SETTINGS
def test_random_infer_bodies(
    live: Live, path: str, body: dict[str, Any], tail: bytes, claimed: int | None
) -> None:
    text = json.dumps(body).encode()
    headers = {} if claimed is None else {"inference-header-content-length": str(len(text) + claimed)}
    assert live.status(path, text + tail, headers) < 500
    live.check_healthy()
