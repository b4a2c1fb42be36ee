"""No bytes and no message give an internal error or hurt the next request."""

import os
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.server.rpc.messages import MESSAGES

SETTINGS = settings(
    max_examples=int(os.environ.get("SERVAX_FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
METHODS = ("ModelInfer", "ModelMetadata", "ModelReady", "ServerMetadata", "ServerLive", "ServerReady")
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}

names = st.sampled_from(["x", "ids", "text", "w", ""])
datatypes = st.sampled_from(["BOOL", "INT8", "UINT64", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES", "?"])
parameters = st.dictionaries(
    st.sampled_from(["timeout", "priority", "truncate", "truncate_side", "odd"]),
    st.one_of(
        st.builds(dict),
        st.builds(lambda v: {"bool_param": v}, st.booleans()),
        st.builds(lambda v: {"int64_param": v}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda v: {"uint64_param": v}, st.integers(0, 2**64 - 1)),
        st.builds(lambda v: {"double_param": v}, st.floats()),
        st.builds(lambda v: {"string_param": v}, st.sampled_from(["left", "right", ""])),
    ),
    max_size=2,
)
contents = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=8),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8),
        "int64_contents": st.lists(st.integers(0, 2**31), min_size=8, max_size=8),
        "fp32_contents": st.lists(st.floats(width=32), min_size=8, max_size=8),
        "fp64_contents": st.lists(st.floats(), max_size=8),
        "bytes_contents": st.lists(st.binary(max_size=4), max_size=4),
    },
)
sizes = st.lists(st.integers(-1, 9), max_size=3) | st.sampled_from([[1, 8], [2**62, 4, 2**62], [1], [1, 0]])
tensors = st.fixed_dictionaries(
    {"name": names, "datatype": datatypes, "shape": sizes},
    optional={"contents": contents, "parameters": parameters},
)
requests = st.fixed_dictionaries(
    {"model_name": st.sampled_from(["toy", "double", "bf16", "ragged", "no"])},
    optional={
        "model_version": st.sampled_from(["", "1", "2"]),
        "id": st.text(max_size=3),
        "inputs": st.lists(tensors, max_size=3),
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["y", "n", "z"])}), max_size=2),
        "parameters": parameters,
        "raw_input_contents": st.lists(st.binary(max_size=40), max_size=3),
    },
)


def status_of(site: Any, content: bytes, method: str = "ModelInfer") -> str:
    try:
        site.call(method)(content)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("method", METHODS)
@given(content=st.binary(max_size=200))
@SETTINGS
def test_random_bytes(site: Any, method: str, content: bytes) -> None:
    assert status_of(site, content, method) in ALLOWED


@given(request=requests)
@SETTINGS
def test_random_messages(site: Any, request: dict[str, Any]) -> None:
    assert status_of(site, MESSAGES["ModelInferRequest"](**request).SerializeToString()) in ALLOWED
    site.check_healthy()


@given(request=requests, at=st.floats(0, 1), flip=st.integers(1, 255))
@SETTINGS
def test_messages_with_one_byte_changed(site: Any, request: dict[str, Any], at: float, flip: int) -> None:
    content = bytearray(MESSAGES["ModelInferRequest"](**request).SerializeToString())
    content[int(at * (len(content) - 1))] ^= flip
    assert status_of(site, bytes(content)) in ALLOWED
    site.check_healthy()
