"""Open Inference Protocol v2 over REST, in JSON and binary, by hand."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import ml_dtypes
import msgspec
import numpy as np
from servax.server.http.kserve_schema import InferResponse

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


def tensor(name: str, shape: list[int], datatype: str, data: Any, **rest: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **rest}


def outputs(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {out["name"]: out for out in response.json()["outputs"]}


def test_V1_zero_rows(site: Any) -> None:
    got = outputs(site.infer("double", tensor("x", [0, 8], "FP32", [])))
    assert (got["y"]["shape"], got["y"]["datatype"], got["y"]["data"]) == ([0, 8], "FP32", [])
    assert (got["n"]["shape"], got["n"]["datatype"]) == ([0], "INT64")
    head = {
        "inputs": [{"name": "x", "shape": [0, 8], "datatype": "FP32", "parameters": {"binary_data_size": 0}}]
    }
    assert outputs(site.binary("double", head))["y"]["shape"] == [0, 8]
    assert outputs(site.infer("ragged", tensor("x", [0, 5], "FP32", [])))["y"]["shape"] == [0, 0]
    assert outputs(site.infer("toy", tensor("text", [0], "BYTES", [])))["embedding"]["shape"] == [0, 4]
    assert site.double.calls == site.toy.calls == []


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
    answer = site.binary("bf16", head, b"\xcd\x3d")
    cut = int(answer.headers["inference-header-content-length"])
    assert answer.content[cut:] == b"\xcd\x3d"
    assert json.loads(answer.content[:cut])["outputs"][0]["parameters"] == {"binary_data_size": 2}


def test_nested_data_and_missing_data(site: Any, refused: Callable[..., str]) -> None:
    rows = [[1.0] * 8, [2.0] * 8]
    assert (
        outputs(site.infer("double", tensor("x", [2, 8], "FP32", rows)))["y"]["data"] == [2.0] * 8 + [4.0] * 8
    )
    refused(
        site.infer("double", {"name": "x", "shape": [1, 8], "datatype": "FP32"}), 400, "bad_tensor", "neither"
    )


def test_text_must_come_alone_and_in_one_column(site: Any, refused: Callable[..., str]) -> None:
    text = tensor("text", [1], "BYTES", ["a"])
    ids = tensor("ids", [1, 1], "INT32", [5])
    refused(site.infer("toy", text, ids), 400, "bad_tensor", "'text' too")
    refused(site.infer("toy", tensor("text", [1, 2], "BYTES", ["a", "b"])), 400, "bad_tensor", "[n, 1]")
    refused(site.infer("double", tensor("text", [1], "BYTES", ["a"])), 400, "bad_tensor", "'text'")
    empty = tensor("text", [2], "BYTES", ["a", ""])
    refused(site.infer("toy", empty), 400, "bad_tensor", "at least one character", "index 1")
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
    refused(site.binary("double", head, nan), 400, "non_finite_input", "'x'")
    site.double.allow_nonfinite = True
    response = site.binary("double", head, nan)
    site.double.allow_nonfinite = False
    refused(response, 400, "bad_request", "JSON holds finite", "'y'", "binary_data")


def test_a_model_that_loses_rows_is_a_500(site: Any) -> None:
    async def submit(rows: Any, **_: Any) -> list[Any]:
        return []

    site.double.submit = submit
    response = site.infer("double", X8)
    assert (response.status_code, response.json()["reason"]) == (500, "model")
    assert "expected 1 rows, got 0" in response.json()["error"]
