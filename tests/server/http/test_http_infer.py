"""Open Inference Protocol v2 over REST, in JSON and binary, by hand and through tritonclient."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
from servax.server.http.kserve_schema import InferError, InferResponse
from tritonclient.utils import InferenceServerException

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


def tensor(name: str, shape: list[int], datatype: str, data: Any, **rest: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **rest}


def outputs(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {out["name"]: out for out in response.json()["outputs"]}


def binary(site: Any, model: str, head: dict[str, Any], *blobs: bytes) -> httpx.Response:
    text = json.dumps(head).encode()
    headers = {"inference-header-content-length": str(len(text))}
    return site.call("POST", f"/v2/models/{model}/infer", content=b"".join([text, *blobs]), headers=headers)


@pytest.fixture(scope="module")
def client(live_site: tuple[Any, str]) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(live_site[1].removeprefix("http://"))
    yield client
    client.close()


def test_tritonclient_reads_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "1")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("double", "1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert metadata["outputs"][1] == {"name": "n", "datatype": "INT64", "shape": [-1]}
    toy = client.get_model_metadata("toy")
    assert toy["inputs"][0] == {"name": "ids", "datatype": "INT32", "shape": [-1, -1]}
    assert toy["inputs"][1]["datatype"] == "BYTES"
    assert toy["limits"] == {"length": 16, "batch": 8}
    with pytest.raises(InferenceServerException, match="must be one that is served, got 'no'"):
        client.get_model_metadata("no")


@pytest.mark.parametrize("as_binary", [True, False])
def test_tritonclient_infers(client: triton.InferenceServerClient, as_binary: bool) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    x = triton.InferInput("x", [2, 8], "FP32")
    x.set_data_from_numpy(rows, binary_data=as_binary)
    wanted = [triton.InferRequestedOutput("y", binary_data=as_binary)]
    answer = client.infer("double", [x], outputs=wanted, request_id="r1", model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("y"), rows * 2)
    assert answer.as_numpy("n") is None
    assert answer.get_response()["id"] == "r1"
    everything = client.infer("double", [x])
    assert everything.as_numpy("n").tolist() == [8, 8]


def test_tritonclient_sends_text(client: triton.InferenceServerClient) -> None:
    for shape in ([2], [2, 1]):
        text = triton.InferInput("text", shape, "BYTES")
        text.set_data_from_numpy(np.array(["a cat", "🦜"], object).reshape(shape))
        answer = client.infer("toy", [text]).as_numpy("embedding")
        assert answer.tolist() == [[4, 27, 1, 2], [3, 14, 1, 2]]


def test_tritonclient_sees_errors_with_their_status(client: triton.InferenceServerClient) -> None:
    x = triton.InferInput("x", [1, 7], "FP32")
    x.set_data_from_numpy(np.zeros((1, 7), np.float32))
    with pytest.raises(InferenceServerException, match="reshape it") as caught:
        client.infer("double", [x])
    assert caught.value.status() == "400"


def test_V1_zero_rows(site: Any) -> None:
    got = outputs(site.infer("double", tensor("x", [0, 8], "FP32", [])))
    assert (got["y"]["shape"], got["y"]["datatype"], got["y"]["data"]) == ([0, 8], "FP32", [])
    assert (got["n"]["shape"], got["n"]["datatype"]) == ([0], "INT64")
    head = {
        "inputs": [{"name": "x", "shape": [0, 8], "datatype": "FP32", "parameters": {"binary_data_size": 0}}]
    }
    assert outputs(binary(site, "double", head))["y"]["shape"] == [0, 8]
    assert outputs(site.infer("ragged", tensor("x", [0, 5], "FP32", [])))["y"]["shape"] == [0, 0]
    assert outputs(site.infer("toy", tensor("text", [0], "BYTES", [])))["embedding"]["shape"] == [0, 4]
    assert site.double.calls == site.toy.calls == []


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


def test_V3_token_tensors_keep_the_text_rule(site: Any, refused: Callable[..., str]) -> None:
    exact = outputs(site.infer("toy", tensor("ids", [1, 16], "INT64", [7] * 16)))
    assert exact["embedding"]["data"] == [16, 112, 7, 7]
    over = tensor("ids", [1, 17], "INT64", [7] * 17)
    text = tensor("text", [1], "BYTES", ["cat " * 15])
    for one in (over, text):
        refused(site.infer("toy", one), 400, "too_long", "at most 16 tokens", "17")
        answer = site.infer("toy", one, parameters={"truncate": True, "truncate_side": "left"})
        assert json.loads(answer.json()["parameters"]["truncated"]) == [{"index": 0, "from": 17, "to": 16}]
        assert answer.headers["x-servax-truncated"] == "1"
        assert site.toy.calls[-2][0]["ids"].size == 16 or site.toy.calls[-1][0]["ids"].size == 16
    refused(site.infer("toy", over, parameters={"truncate_side": "up"}), 400, "bad_request", "'up'")
    refused(site.infer("toy", over, parameters={"truncate": 1}), 400, "bad_request", "'truncate'")
    refused(site.infer("double", X8, parameters={"truncate": True}), 400, "bad_request", "tokenizer")
    refused(site.infer("toy", tensor("ids", [1, 1], "INT32", [1000])), 400, "bad_tensor", "0 to 999", "1000")


def test_V5_casts_within_range(site: Any, refused: Callable[..., str]) -> None:
    site.infer("toy", tensor("ids", [1, 3], "INT64", [5, 6, 7]))
    assert site.toy.calls[-1][0]["ids"].dtype == np.int32
    message = refused(
        site.infer("toy", tensor("ids", [1, 1], "INT64", [2**31])), 400, "bad_tensor", str(2**31)
    )
    assert "INT64" in message
    assert "INT32" in message
    half = outputs(site.infer("half", tensor("x", [1, 2], "FP16", [0.5, 3])))
    assert (half["y"]["datatype"], half["y"]["data"]) == ("FP16", [1.0, 6.0])
    assert outputs(site.infer("half", tensor("x", [1, 2], "FP64", [0.5, 3])))["y"]["data"] == [1.0, 6.0]
    assert outputs(site.infer("half", tensor("x", [1, 2], "INT8", [1, 3])))["y"]["data"] == [2.0, 6.0]
    refused(site.infer("half", tensor("x", [1, 2], "FP16", [1e6, 0])), 400, "bad_tensor", "1000000.0", "FP16")
    refused(site.infer("half", tensor("x", [1, 2], "INT32", [2049, 0])), 400, "bad_tensor", "2049", "FP16")
    refused(site.infer("toy", tensor("ids", [1, 1], "FP32", [5])), 400, "bad_tensor", "INT32", "FP32")
    refused(site.infer("half", tensor("x", [1, 2], "BOOL", [True, False])), 400, "bad_tensor", "FP16", "BOOL")


def test_V5_bfloat16_bytes_come_back_unchanged(site: Any) -> None:
    numbers = outputs(site.infer("bf16", tensor("x", [1, 1], "BF16", [0.1])))["y"]
    assert numbers["datatype"] == "BF16"
    assert ml_dtypes.bfloat16(numbers["data"][0]) == ml_dtypes.bfloat16(0.1) * ml_dtypes.bfloat16(2)
    site.bf16.run = lambda row: {"y": row["x"], "n": np.array(1, np.int64)}
    head = {
        "inputs": [{"name": "x", "shape": [1, 1], "datatype": "BF16", "parameters": {"binary_data_size": 2}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
    answer = binary(site, "bf16", head, b"\xcd\x3d")
    cut = int(answer.headers["inference-header-content-length"])
    assert answer.content[cut:] == b"\xcd\x3d"
    assert json.loads(answer.content[:cut])["outputs"][0]["parameters"] == {"binary_data_size": 2}


def test_V6_counts_that_do_not_match(site: Any, refused: Callable[..., str]) -> None:
    expected = "expected 32 values / 128 bytes, got 31 / 124"
    refused(site.infer("double", tensor("x", [4, 8], "FP32", [1.0] * 31)), 400, "bad_tensor", expected)
    raw = {"name": "x", "shape": [4, 8], "datatype": "FP32", "parameters": {"binary_data_size": 124}}
    refused(binary(site, "double", {"inputs": [raw]}, bytes(124)), 400, "bad_tensor", expected)
    mixed = raw | {"data": [1.0] * 32, "parameters": {"binary_data_size": 128}}
    refused(binary(site, "double", {"inputs": [mixed]}, bytes(128)), 400, "bad_tensor", "got both")
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


def test_nested_data_and_missing_data(site: Any, refused: Callable[..., str]) -> None:
    rows = [[1.0] * 8, [2.0] * 8]
    assert (
        outputs(site.infer("double", tensor("x", [2, 8], "FP32", rows)))["y"]["data"] == [2.0] * 8 + [4.0] * 8
    )
    refused(
        site.infer("double", {"name": "x", "shape": [1, 8], "datatype": "FP32"}), 400, "bad_tensor", "neither"
    )


def test_binary_sizes_must_add_up(site: Any, refused: Callable[..., str]) -> None:
    def head(size: Any) -> dict[str, Any]:
        parameters = {"binary_data_size": size}
        return {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": parameters}]}

    refused(binary(site, "double", head(32), bytes(31)), 400, "bad_tensor", "32", "31 bytes left")
    refused(binary(site, "double", head(32), bytes(40)), 400, "bad_tensor", "40 bytes", "claims 32")
    refused(binary(site, "double", head(-1), bytes(32)), 400, "bad_request", "binary_data_size", "-1")
    refused(binary(site, "double", head("32"), bytes(32)), 400, "bad_request", "'32'")
    for length in ("-1", "x", "99999", "٣"):
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
    refused(binary(site, "toy", head, blob), 400, "bad_tensor", *words)


def test_text_must_come_alone_and_in_one_column(site: Any, refused: Callable[..., str]) -> None:
    text = tensor("text", [1], "BYTES", ["a"])
    ids = tensor("ids", [1, 1], "INT32", [5])
    refused(site.infer("toy", text, ids), 400, "bad_tensor", "'text' too")
    refused(site.infer("toy", tensor("text", [1, 2], "BYTES", ["a", "b"])), 400, "bad_tensor", "[n, 1]")
    refused(site.infer("double", tensor("text", [1], "BYTES", ["a"])), 400, "bad_tensor", "'text'")
    assert outputs(site.infer("toy", tensor("text", [2, 1], "BYTES", [["a"], ["b"]])))["embedding"][
        "shape"
    ] == [2, 4]


def test_outputs_asked_for_by_name(site: Any, refused: Callable[..., str]) -> None:
    assert list(outputs(site.infer("double", X8, outputs=[{"name": "n"}]))) == ["n"]
    assert list(outputs(site.infer("double", X8, outputs=[]))) == ["y", "n"]
    refused(site.infer("double", X8, outputs=[{"name": "q"}]), 400, "bad_tensor", "'q'", "['y', 'n']")
    refused(site.infer("double", X8, outputs=[{"name": "n"}, {"name": "n"}]), 400, "bad_tensor", "once")
    odd = [{"name": "n", "parameters": {"classification": 2}}]
    refused(site.infer("double", X8, outputs=odd), 400, "bad_request", "classification")
    odd = [{"name": "n", "parameters": {"binary_data": 2}}]
    refused(site.infer("double", X8, outputs=odd), 400, "bad_request", "binary_data")
    body = msgspec.json.decode(site.infer("double", X8, id="i").content, type=InferResponse)
    assert (body.request_id, body.model_version) == ("i", "1")


def test_priority_and_timeout_are_passed_on(site: Any, refused: Callable[..., str]) -> None:
    site.infer("double", X8, parameters={"priority": 3, "timeout": 1_500_000})
    site.infer("double", X8, parameters={"timeout": 0})
    (priority, timeout_s), unset = site.double.options
    assert (priority, unset) == (3, (0, None))
    assert 1.4 < timeout_s < 1.5  # the time runs from when the head of the request was read
    for name, value in (("priority", -1), ("timeout", 1.5), ("timeout", True), ("sequence_id", 4)):
        refused(site.infer("double", X8, parameters={name: value}), 400, "bad_request", f"'{name}'")


def test_rows_must_be_equal_in_number_and_outputs_in_shape(site: Any, refused: Callable[..., str]) -> None:
    site.ragged.run = lambda row: {"y": row["x"][: int(row["x"][0])], "n": np.array(1, np.int64)}
    two = tensor("x", [2, 2], "FP32", [1, 1, 2, 2])
    refused(site.infer("ragged", two), 400, "bad_tensor", "equal length", "'y'")


def test_nonfinite_values(site: Any, refused: Callable[..., str]) -> None:
    head = {
        "inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": 32}}]
    }
    nan = np.full((1, 8), np.nan, "<f4").tobytes()
    refused(binary(site, "double", head, nan), 400, "non_finite_input", "'x'")
    site.double.allow_nonfinite = True
    response = binary(site, "double", head, nan)
    site.double.allow_nonfinite = False
    refused(response, 400, "bad_request", "JSON holds finite", "'y'", "binary_data")


def test_a_model_that_loses_rows_is_a_500(site: Any) -> None:
    async def submit(rows: Any, **_: Any) -> list[Any]:
        return []

    site.double.submit = submit
    response = site.infer("double", X8)
    assert (response.status_code, response.json()["reason"]) == (500, "model")
    assert "expected 1 rows, got 0" in response.json()["error"]
