"""Open Inference Protocol v2 over REST, through tritonclient."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


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
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository"]
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
