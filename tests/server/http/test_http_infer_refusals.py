"""Open Inference Protocol v2 over REST: what is refused, and how that is told."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from servax.server.http.kserve_schema import InferError

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


def tensor(name: str, shape: list[int], datatype: str, data: Any, **rest: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **rest}


@pytest.mark.parametrize("ident", [None, "q7"])
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([tensor("x", [1, 0], "FP32", [])], ("'x'", "length")),
        ([], ("'x'", "none named")),
        ([tensor("z", [1, 3], "FP32", [1, 2, 3])], ("'z'", "['x']")),
        ([tensor("x", [1, 1], "FP32", [1]), tensor("w", [1], "FP32", [1])], ("'w'", "['x']")),
        ([tensor("x", [1, 1], "FP32", [1]), tensor("x", [1, 1], "FP32", [1])], ("'x' twice",)),
    ],
)
def test_V2_bad_inputs_are_named_and_the_id_is_echoed(
    site: Any, refused: Callable[..., str], inputs: list[Any], words: tuple[str, ...], ident: str | None
) -> None:
    response = site.infer("ragged", *inputs, **({"id": ident} if ident else {}))
    refused(response, 400, "bad_tensor", *words)
    assert response.json().get("id") == ident
    assert site.ragged.calls == []


def test_V2_the_id_is_echoed_even_if_the_rest_does_not_parse(site: Any, refused: Callable[..., str]) -> None:
    response = site.infer("double", X8, id="q8", output=[])
    refused(response, 400, "bad_request", "unknown field `output`")
    assert response.json()["id"] == "q8"
    response = site.call("POST", "/v2/models/no/infer", json={"inputs": [X8], "id": "q9"})
    refused(response, 404, "unknown_model", "'no'")
    assert response.json()["id"] == "q9"
    refused(
        site.call("POST", "/v2/models/double/versions/2/infer", json={"inputs": [X8]}),
        404,
        "unknown_model",
        "'2'",
    )
    assert msgspec.json.decode(response.content, type=InferError).reason == "unknown_model"


def test_V6_counts_that_do_not_match(site: Any, refused: Callable[..., str]) -> None:
    expected = "expected 32 values / 128 bytes, got 31 / 124"
    refused(site.infer("double", tensor("x", [4, 8], "FP32", [1.0] * 31)), 400, "bad_tensor", expected)
    raw = {"name": "x", "shape": [4, 8], "datatype": "FP32", "parameters": {"binary_data_size": 124}}
    refused(site.binary("double", {"inputs": [raw]}, bytes(124)), 400, "bad_tensor", expected)
    mixed = raw | {"data": [1.0] * 32, "parameters": {"binary_data_size": 128}}
    refused(site.binary("double", {"inputs": [mixed]}, bytes(128)), 400, "bad_tensor", "got both")
    assert all(len(call) == 1 for call in site.double.calls)


@pytest.mark.parametrize(
    ("change", "status", "reason", "words"),
    [
        ({"datatype": "FP8"}, 400, "bad_tensor", ("FP8", "FP32")),
        ({"datatype": "BYTES", "data": ["a"] * 8}, 400, "bad_tensor", ("FP32", "BYTES")),
        ({"shape": [8]}, 400, "bad_tensor", ("[rows, 8]", "[8]")),
        ({"shape": [2, 4]}, 400, "bad_tensor", ("[rows, 8]", "[2, 4]")),
        ({"shape": [-1, -8]}, 400, "bad_tensor", ("0 or more", "-1")),
        ({"shape": ["1", 8]}, 400, "bad_request", ("shape",)),
        ({"shape": [10**30, 0], "data": []}, 400, "bad_tensor", ("possible shape",)),
        ({"shape": [1] * 99, "data": [1]}, 400, "bad_tensor", ("possible shape",)),
        ({"shape": [10**9, 8, 0], "data": []}, 400, "bad_tensor", ("[rows, 8]",)),
        ({"shape": [65, 8], "data": [0] * 520}, 400, "too_many_rows", ("at most 64", "65")),
        ({"data": None}, 400, "bad_tensor", ("array",)),
        ({"data": "abc"}, 400, "bad_tensor", ("array",)),
        ({"data": ["1"] * 8}, 400, "bad_tensor", ("`float`", "`str`")),
        ({"data": [True] * 8}, 400, "bad_tensor", ("`float`", "`bool`")),
        ({"data": [[1, 2], [3]]}, 400, "bad_tensor", ("regular",)),
        ({"data": [[1] * 4] * 2}, 400, "bad_tensor", ("[1, 8]", "[2, 4]")),
        ({"data": [[[1] * 8]]}, 400, "bad_tensor", ("`float`", "`array`")),
        ({"datatype": "UINT8", "data": [300] * 8}, 400, "bad_tensor", ("0 to 255", "300")),
        ({"datatype": "INT64", "data": [1.5] * 8}, 400, "bad_tensor", ("`int`", "`float`")),
        ({"datatype": "INT64", "data": [2**70] * 8}, 400, "bad_tensor", (str(2**70),)),
        ({"data": [1e39] * 8}, 400, "bad_tensor", ("FP32", "1e+39")),
        ({"parameters": {"shared_memory_region": "r"}}, 400, "bad_request", ("shared_memory_region",)),
        ({"parameters": {"binary_data_size": 32}}, 400, "bad_tensor", ("got both",)),
        ({"name": 5}, 400, "bad_request", ("name",)),
    ],
)
def test_refusals_of_one_tensor(
    site: Any,
    refused: Callable[..., str],
    change: dict[str, Any],
    status: int,
    reason: str,
    words: tuple[str, ...],
) -> None:
    refused(site.infer("double", X8 | change), status, reason, *words)


def test_binary_sizes_must_add_up(site: Any, refused: Callable[..., str]) -> None:
    def head(size: Any) -> dict[str, Any]:
        parameters = {"binary_data_size": size}
        return {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": parameters}]}

    refused(site.binary("double", head(32), bytes(31)), 400, "bad_tensor", "32", "31 bytes left")
    refused(site.binary("double", head(32), bytes(40)), 400, "bad_tensor", "40 bytes", "claims 32")
    refused(site.binary("double", head(-1), bytes(32)), 400, "bad_request", "binary_data_size", "-1")
    refused(site.binary("double", head("32"), bytes(32)), 400, "bad_request", "'32'")
    for length in ("-1", "x", "99999", "9" * 5000, "0" * 5000, "٣"):
        headers = {"inference-header-content-length": length.encode("utf-8")}
        response = site.call("POST", "/v2/models/double/infer", content=b"{}", headers=headers)
        refused(response, 400, "bad_request", "Inference-Header-Content-Length")


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"\x05\x00\x00\x00abc", ("length 5", "3 bytes left")),
        (b"\x01\x00", ("0 bytes left",)),
        (b"\x01\x00\x00\x00\xff", ("UTF-8",)),
        (b"\x01\x00\x00\x00a\x01\x00\x00\x00b", ("expected 1 strings, got 2",)),
    ],
)
def test_byte_strings_must_be_well_formed(
    site: Any, refused: Callable[..., str], blob: bytes, words: tuple[str, ...]
) -> None:
    parameters = {"binary_data_size": len(blob)}
    head = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": parameters}]}
    refused(site.binary("toy", head, blob), 400, "bad_tensor", *words)
