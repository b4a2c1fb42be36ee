"""Whatever is sent over a socket, nothing of it gives a 5xx or hurts the next request.

`SERVAX_FUZZ_EXAMPLES=5000` for these and the `*_random_bytes.py` of both protocols is 100,000 inputs in all.
"""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=int(os.environ.get("SERVAX_FUZZ_EXAMPLES", "120")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
PATHS = ["/v2/models/double/infer", "/v2/models/bf16/infer", "/v2/models/toy/infer", "/v1/embeddings"]
GOOD = b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":[1.5,1.5,1.5,1.5,1.5,1.5,1.5,1.5]}]}'


def asked(path: str, body: bytes, *headers: bytes, method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"host: x", *headers]
    if not any(one.lower().startswith((b"content-length", b"transfer-encoding")) for one in headers):
        head.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


class Wire:
    """Sends bytes, each time on a connection of its own, and looks at what came back."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))

    def send(self, content: bytes) -> bytes:
        """All that is answered until the server closes, which it does once nothing more can come."""
        found = []
        with socket.create_connection(self.address, timeout=30) as client:
            try:
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
                while part := client.recv(65536):
                    found.append(part)
            except (ConnectionResetError, BrokenPipeError):  # closed by the server with bytes unread
                pass
        return b"".join(found)

    def check(self, content: bytes) -> None:
        answer = self.send(content)
        assert b"HTTP/1.1 5" not in answer, answer[:2000]
        after = self.send(asked(PATHS[0], GOOD, b"connection: close"))
        assert b'"data":[3.0,3.0,3.0,3.0,3.0,3.0,3.0,3.0]' in after, after[:2000]


@pytest.fixture(scope="module")
def wire(live_site: tuple[Any, str]) -> Iterator[Wire]:
    site, url = live_site
    yield Wire(url)
    assert site.engine.live


# fmt: off
tokens = st.sampled_from([
    b"POST ", b"GET ", b"PUT ", b"/v1/embeddings", b"/v2/models/double/infer", b"/%00%ff/..", b"?a=%", b"*",
    b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/9.9\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\0", b": ", b" ",
    b"host: x", b"content-length: 5", b"content-length: -1", b"transfer-encoding: chunked", b"5\r\nhello\r\n",
    b"0\r\n\r\n", b"expect: 100-continue", b"connection: upgrade", b"upgrade: h2c", b"upgrade: websocket",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b'{"inputs":[', GOOD, b"\x16\x03\x01\x02\x00", b"a" * 9000,
])
names = st.sampled_from([
    b"content-length", b"transfer-encoding", b"content-encoding", b"content-type", b"expect", b"connection",
    b"inference-header-content-length", b"x-request-id", b"traceparent", b"authorization", b"x-api-key",
    b"accept-encoding", b"te", b"upgrade", b"host", b"x-forwarded-for", b"Content-Length",
])
texts = st.binary(max_size=24) | st.sampled_from([
    b"0", b"1", b"99", b"104", b"-1", b"+5", b"1e3", b"0x10", b"9" * 30, b" 7 ", "²".encode(), b"\xb2",
    b"chunked", b"gzip", b"gzip, chunked", b"identity", b"100-continue", b"close", b"upgrade, close",
    b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"ff-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"Bearer",
])
numbers = st.sampled_from([
    "1e999", "-1e999", "1e-999", "9" * 400, "-" + "9" * 25, "0.1" + "0" * 400 + "1", "NaN", "Infinity", "-0",
    "-", "01", "1.", ".5", "1e", "2147483648", "3.5e38", "1e39", "true", "null",
    '"1"', '"\\ud800"', '"\\u0000"',
])
# fmt: on


@given(parts=st.lists(tokens | st.binary(max_size=12), max_size=14))
@SETTINGS
def test_X5_pieces_of_http_and_of_nothing(wire: Wire, parts: list[bytes]) -> None:
    wire.check(b"".join(parts))


@given(
    path=st.sampled_from([*PATHS, "/v2/models/%2e%2e/infer", "/v2/models/\xe9/infer", "//", "/v2?x=\x7f"]),
    method=st.sampled_from(["POST", "GET", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE"]),
    headers=st.lists(st.tuples(names, texts), max_size=5),
    body=st.just(GOOD) | st.binary(max_size=60),
)
@SETTINGS
def test_X5_headers_that_say_odd_things(
    wire: Wire, path: str, method: str, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    wire.check(asked(path, body, *[name + b": " + text for name, text in headers], method=method))


shapes = st.lists(st.integers(-1, 9), max_size=3) | st.sampled_from(
    [[1, 8], [1, 4], [2**62, 4, 2**62], [2**63, 1], [1] * 70, [0, 8], [1, 0], [0, 2**40]]
)
raw_tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "ids", "text"]),
        "shape": shapes,
        "datatype": st.sampled_from(["FP32", "FP16", "BF16", "INT64", "INT8", "BOOL", "BYTES"]),
        "parameters": st.fixed_dictionaries(
            {"binary_data_size": st.integers(-1, 70) | st.sampled_from([2**31, 2**63 - 1, 32, 8])}
        ),
    }
)


@given(
    path=st.sampled_from(PATHS[:3]),
    inputs=st.lists(raw_tensors, min_size=1, max_size=3),
    tail=st.binary(max_size=70) | st.binary(min_size=32, max_size=32),
    claimed=st.sampled_from([0, 0, 0, -1, 1, 10**6, None]),
    binary=st.booleans(),
)
@SETTINGS
def test_X5_binary_tensors_of_wrong_lengths(
    wire: Wire, path: str, inputs: list[dict[str, Any]], tail: bytes, claimed: int | None, binary: bool
) -> None:
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    said = () if claimed is None else (b"inference-header-content-length: %d" % (len(text) + claimed),)
    wire.check(asked(path, text + tail, *said))


nested = st.tuples(st.sampled_from(["[", '{"a":', "[[", "[1,"]), st.integers(0, 5000)).map(
    lambda p: p[0] * p[1]
)
values = st.lists(numbers, max_size=9).map(lambda some: "[" + ",".join(some) + "]") | numbers | nested


@given(
    path=st.sampled_from(PATHS), value=values, place=st.sampled_from(["data", "shape", "id", "input", "all"])
)
@SETTINGS
def test_X5_numbers_and_nestings_that_are_too_much(wire: Wire, path: str, value: str, place: str) -> None:
    data, shape = (
        value if place == name else plain for name, plain in (("data", "[1,2]"), ("shape", "[1,2]"))
    )
    said = value if place == "id" else '"q"'
    text = f'{{"id":{said},"inputs":[{{"name":"x","datatype":"FP32","shape":{shape},"data":{data}}}]}}'
    if path == "/v1/embeddings":
        text = f'{{"model":"toy","input":{value},"dimensions":{value if place == "shape" else 2}}}'
    wire.check(asked(path, (value if place == "all" else text).encode()))
