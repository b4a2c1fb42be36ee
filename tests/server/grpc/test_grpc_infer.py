"""Open Inference Protocol v2 over gRPC, by hand and through tritonclient; REST says the same of each."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from servax.server.rpc.testing import infer_request, output_of
from tritonclient.utils import InferenceServerException


def tensor(name: str, shape: list[int], datatype: str, data: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def infer(model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    return infer_request(model, inputs, **fields)


X8 = tensor("x", [1, 8], "FP32", [1.5] * 8)


def test_tritonclient_reads_health_and_metadata(site: Any) -> None:
    client = site.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "1")
    assert list(client.get_server_metadata().extensions) == ["binary_tensor_data", "model_repository"]
    metadata = client.get_model_metadata("toy", "1")
    found = [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs]
    assert found == [("ids", "INT32", [-1, -1]), ("text", "BYTES", [-1])]
    assert (metadata.name, metadata.versions, metadata.platform) == ("toy", ["1"], "jax_xla")
    assert client.get_model_metadata("double", as_json=True)["outputs"][1]["datatype"] == "INT64"
    for call in (client.get_model_metadata, client.is_model_ready):
        with pytest.raises(InferenceServerException, match="got 'no'") as caught:
            call("no")
        assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_tritonclient_infers(site: Any) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    x = triton.InferInput("x", [2, 8], "FP32")
    x.set_data_from_numpy(rows)
    wanted = [triton.InferRequestedOutput("y")]
    answer = site.client.infer("double", [x], outputs=wanted, request_id="r1", model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("y"), rows * 2)
    assert answer.as_numpy("n") is None
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r1", "double", "1")
    everything = site.client.infer("double", [x], compression_algorithm="gzip")
    assert everything.as_numpy("n").tolist() == [8, 8]
    assert everything.get_response().id == ""


def test_tritonclient_sends_text(site: Any) -> None:
    for shape in ([2], [2, 1]):
        text = triton.InferInput("text", shape, "BYTES")
        text.set_data_from_numpy(np.array(["a cat", "🦜"], object).reshape(shape))
        answer = site.client.infer("toy", [text]).as_numpy("embedding")
        assert answer.tolist() == [[4, 27, 1, 2], [3, 14, 1, 2]]
    typed = site.send(infer("toy", tensor("text", [2], "BYTES", ["a cat", "🦜"])))
    assert output_of(typed, "embedding").tolist() == [[4, 27, 1, 2], [3, 14, 1, 2]]


def test_tritonclient_sees_errors_with_their_status(site: Any) -> None:
    x = triton.InferInput("x", [1, 7], "FP32")
    x.set_data_from_numpy(np.zeros((1, 7), np.float32))
    with pytest.raises(InferenceServerException, match="reshape it") as caught:
        site.client.infer("double", [x])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_V1_zero_rows(site: Any) -> None:
    for data in ([], b""):
        answer = site.send(infer("double", tensor("x", [0, 8], "FP32", data)))
        found = [(one.name, one.datatype, list(one.shape)) for one in answer.outputs]
        assert found == [("y", "FP32", [0, 8]), ("n", "INT64", [0])]
        assert list(answer.raw_output_contents) == [b"", b""]
        text = site.send(infer("toy", tensor("text", [0], "BYTES", data)))
        assert list(text.outputs[0].shape) == [0, 4]
    assert site.double.calls == site.toy.calls == []
    empty = triton.InferInput("x", [0, 8], "FP32")
    empty.set_data_from_numpy(np.zeros((0, 8), np.float32))
    assert site.client.infer("double", [empty]).as_numpy("y").shape == (0, 8)


@pytest.mark.parametrize("ident", ["", "q7"])
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
    site: Any, inputs: list[Any], words: tuple[str, ...], ident: str
) -> None:
    refusal = site.refused(infer("ragged", *inputs, id=ident))
    assert all(word in refusal.message for word in words)
    assert refusal.request_id == ident
    assert site.rest("ragged", *inputs).json()["error"] == refusal.message
    assert site.ragged.calls == []


def test_V2_an_empty_body_and_unknown_models(site: Any) -> None:
    assert "got ''" in site.refused(b"", "NOT_FOUND", "unknown_model").message
    refusal = site.refused(infer("no", X8, id="q9"), "NOT_FOUND", "unknown_model")
    assert refusal.request_id == "q9"
    assert site.rest("no", X8).json()["error"] == refusal.message
    site.refused(infer("double", X8, model_version="2"), "NOT_FOUND", "unknown_model")


def test_V3_V4_tokens_keep_the_text_rule(site: Any) -> None:
    exact = site.send(infer("toy", tensor("ids", [1, 16], "INT64", [7] * 16)))
    assert output_of(exact, "embedding").tolist() == [[16, 112, 7, 7]]
    before = site.metrics.value("servax_truncated_inputs_total", model="toy")
    over = tensor("ids", [1, 17], "INT64", [1, *range(10, 25), 2])
    text = tensor("text", [1], "BYTES", ["cat " * 15])
    for one in (over, text):
        refusal = site.refused(infer("toy", one), reason="too_long")
        assert "at most 16 tokens" in refusal.message
        assert site.rest("toy", one).json()["error"] == refusal.message
        for side, kept in (("left", [11, 24]), ("right", [10, 23])):
            site.toy.calls.clear()
            answer = site.send(infer("toy", one, parameters={"truncate": True, "truncate_side": side}))
            listed = json.loads(answer.parameters["truncated"].string_param)
            assert listed == [{"index": 0, "from": 17, "to": 16}]
            ids = site.toy.calls[0][0]["ids"]
            assert ids.size == 16
            assert one is text or ids[[1, -2]].tolist() == kept
    assert site.metrics.value("servax_truncated_inputs_total", model="toy") == before + 4
    long = tensor("text", [1], "BYTES", ["word " * 13_467 + "ab"])
    cut = site.send(infer("toy", long, parameters={"truncate": True}))
    assert output_of(cut, "embedding")[0, 0] == 16


def test_V5_casts_within_range(site: Any) -> None:
    for data in ([5, 6, 7], np.array([5, 6, 7], np.int64).tobytes()):
        site.send(infer("toy", tensor("ids", [1, 3], "INT64", data)))
        assert site.toy.calls[-1][0]["ids"].dtype == np.int32
    wide = tensor("ids", [1, 1], "INT64", [2**31])
    refusal = site.refused(infer("toy", wide))
    assert all(word in refusal.message for word in (str(2**31), "INT64", "INT32"))
    assert site.rest("toy", wide).json()["error"] == refusal.message
    half = site.send(infer("half", tensor("x", [1, 2], "FP16", [0.5, 3])))
    assert (half.outputs[0].datatype, output_of(half, "y").tolist()) == ("FP16", [[1.0, 6.0]])
    tenth = site.send(infer("bf16", tensor("x", [1, 1], "BF16", [0.1])))
    assert output_of(tenth, "y")[0, 0] == ml_dtypes.bfloat16(0.1) * ml_dtypes.bfloat16(2)


def test_V5_bfloat16_bytes_come_back_unchanged(site: Any) -> None:
    run = site.bf16.run
    site.bf16.run = lambda row: {"y": row["x"], "n": np.array(1, np.int64)}
    answer = site.send(infer("bf16", tensor("x", [1, 1], "BF16", b"\xcd\x3d")))
    site.bf16.run = run
    assert answer.raw_output_contents[0] == b"\xcd\x3d"


def test_V6_counts_that_do_not_match(site: Any) -> None:
    expected = "expected 32 values / 128 bytes, got 31 / 124"
    floats = np.ones(31, np.float32)
    for data in (floats.tolist(), floats.tobytes()):
        refusal = site.refused(infer("double", tensor("x", [4, 8], "FP32", data)))
        assert expected in refusal.message
    assert site.rest("double", tensor("x", [4, 8], "FP32", [1.0] * 31)).json()["error"] == refusal.message
    mixed = infer("double", tensor("x", [4, 8], "FP32", [1.0] * 32))
    mixed.raw_input_contents.append(bytes(128))
    assert "contents or raw_input_contents, got both" in site.refused(mixed).message
    neither = infer("double", tensor("x", [4, 8], "FP32", []))
    assert "got neither" in site.refused(neither).message
    half_raw = infer("double", X8, tensor("w", [1], "FP32", bytes(4)))
    assert "expected 2, got 1" in site.refused(half_raw).message
    assert all(len(call) == 1 for call in site.double.calls), "nothing ran but the normal requests"


@pytest.mark.parametrize(
    ("model", "one"),
    [
        ("double", X8 | {"datatype": "FP64", "data": [1e300] * 8}),
        ("double", X8 | {"shape": [8]}),
        ("double", X8 | {"shape": [2, 4]}),
        ("double", X8 | {"shape": [-1, -8]}),
        ("double", X8 | {"shape": [1] * 99, "data": [1.0]}),
        ("double", X8 | {"shape": [65, 8], "data": [0.0] * 520}),
        ("double", tensor("x", [1, 8], "BYTES", ["a"] * 8)),
        ("double", tensor("x", [1, 8], "BYTES", ["a"] * 7)),
        ("tiny", tensor("x", [1, 2], "INT8", [1, 300])),
        ("tiny", tensor("x", [1, 2], "UINT8", [1, 300])),
        ("tiny", tensor("x", [1, 2], "UINT32", [1, 300])),
        ("half", tensor("x", [1, 2], "FP16", [1e6, 0.0])),
        ("half", tensor("x", [1, 2], "INT32", [2049, 0])),
        ("half", tensor("x", [1, 2], "BOOL", [True, False])),
        ("toy", tensor("ids", [1, 1], "FP32", [5.0])),
        ("toy", tensor("ids", [1, 1], "INT32", [1000])),
        ("toy", tensor("ids", [1, 1], "INT32", [-1])),
        ("toy", tensor("text", [1, 2], "BYTES", ["a", "b"])),
        ("toy", tensor("text", [65], "BYTES", ["a"] * 65)),
        ("flags", tensor("x", [1, 2], "UINT8", [0, 1])),
    ],
)
def test_both_transports_refuse_in_the_same_words(site: Any, model: str, one: dict[str, Any]) -> None:
    rest = site.rest(model, one)
    assert rest.status_code == 400, rest.text
    refusal = site.refused(infer(model, one), reason=rest.json()["reason"])
    assert refusal.message == rest.json()["error"]


def test_nan_is_refused_on_both_transports_alike(site: Any) -> None:
    for data in ([float("nan")] * 8, np.full(8, np.inf, np.float32).tobytes()):
        site.refused(infer("double", X8 | {"data": data}), reason="non_finite_input")
    site.double.allow_nonfinite = True
    answer = site.send(infer("double", X8 | {"data": [float("nan")] * 8}))
    assert np.isnan(output_of(answer, "y")).all()


def test_parameters_are_acted_on_or_refused(site: Any) -> None:
    site.send(infer("double", X8, parameters={"priority": 2, "timeout": 1_500_000}))
    site.client.infer("double", [_x8()], priority=3, timeout=2_000_000)
    site.send(infer("double", X8, parameters={"priority": 0, "timeout": 0}))
    # The harness sends a deadline of 30 s with its own calls.
    assert site.double.options[0] == (2, 1.5)
    assert site.double.options[1] == (3, 2.0)
    assert site.double.options[2][0] == 0
    for parameters, words in (
        ({"binary_data_output": True}, "priority, timeout, truncate, truncate_side"),
        ({"sequence_id": 1}, "sequence_id"),
        ({"timeout": -1}, "0 or more"),
        ({"timeout": 1.5}, "'timeout'"),
        ({"priority": True}, "'priority'"),
        ({"truncate": True}, "tokenizer"),
    ):
        refusal = site.refused(infer("double", X8, parameters=parameters), reason="bad_request")
        assert words in refusal.message
    bad_side = infer("toy", tensor("ids", [1, 1], "INT32", [5]), parameters={"truncate_side": "up"})
    assert "'up'" in site.refused(bad_side, reason="bad_request").message
    no_value = infer("double", X8)
    no_value.parameters["priority"].SetInParent()
    assert "needs a value" in site.refused(no_value, reason="bad_request").message
    of_input = infer("double", X8)
    of_input.inputs[0].parameters["shared_memory_region"].string_param = "a"
    assert "shared_memory_region" in site.refused(of_input, reason="bad_request").message
    of_output = infer("double", X8)
    of_output.outputs.add(name="y").parameters["classification"].int64_param = 1
    assert "classification" in site.refused(of_output, reason="bad_request").message


def test_outputs_by_name(site: Any) -> None:
    request = infer("double", X8)
    request.outputs.add(name="n")
    assert [one.name for one in site.send(request).outputs] == ["n"]
    request.outputs.add(name="n")
    assert "asked for once" in site.refused(request).message
    request.outputs[1].name = "z"
    refusal = site.refused(request)
    rest = site.rest("double", X8, outputs=[{"name": "n"}, {"name": "z"}])
    assert refusal.message == rest.json()["error"]


def _x8() -> triton.InferInput:
    x = triton.InferInput("x", [1, 8], "FP32")
    x.set_data_from_numpy(np.ones((1, 8), np.float32))
    return x
