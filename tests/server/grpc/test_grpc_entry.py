"""Keys, traces and causes of refusals over gRPC."""

import json
from typing import Any

import grpc
import pytest
from servax.server.context import CALL
from servax.server.errors import DeviceFailed, Overloaded
from servax.server.rpc.messages import MESSAGES, SERVICE
from servax.server.rpc.service import GrpcConfig, create_grpc_server
from servax.server.rpc.testing import infer_request, running_grpc

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_key_is_asked_for_but_by_probes(site: Any) -> None:
    request = infer_request("double", [X8]).SerializeToString()
    with running_grpc(lambda: create_grpc_server(site.engine, api_keys=("k1", "k2"))) as address:
        with grpc.insecure_channel(address) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            for metadata in ((), (("authorization", "Bearer k3"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    infer(request, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert "k1" not in caught.value.details()
            for metadata in ((("authorization", "Bearer k1"),), (("x-api-key", "k2"),)):
                assert MESSAGES["ModelInferResponse"].FromString(infer(request, metadata=metadata)).outputs
            assert channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")


def test_the_call_knows_its_trace_and_its_client(site: Any) -> None:
    seen: list[Any] = []
    before = site.double.run
    site.double.run = lambda row: (seen.append(CALL.get()), before(row))[1]
    try:
        metadata = (("traceparent", PARENT), ("x-request-id", "r-9"))
        site.send(infer_request("double", [X8]), metadata=metadata)
    finally:
        site.double.run = before
    (call,) = seen
    assert call.request_id == "r-9"
    assert call.trace.trace_id == PARENT.split("-")[1]
    assert "127.0.0.1" in call.client


def test_what_is_refused_for_want_of_room_is_counted_by_its_cause(site: Any) -> None:
    site.double.error = Overloaded("full; retry", 0.2, "deadline")
    before = site.metrics.value("servax_shed_total", model="double", cause="deadline")
    with pytest.raises(grpc.RpcError) as caught:
        site.infer("double", X8)
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "200"
    site.double.error = None
    assert site.metrics.value("servax_shed_total", model="double", cause="deadline") == before + 1


@pytest.mark.parametrize(("lasting", "tries"), [(False, 3), (True, 1)])
def test_a_channel_that_retries_by_policy_does_so_unless_it_is_of_no_use(
    site: Any, *, lasting: bool, tries: int
) -> None:
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.001s",
        "maxBackoff": "0.001s",
        "backoffMultiplier": 1.0,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    counted = {"model": "double", "outcome": "error", "reason": DeviceFailed.reason}
    before = site.requests(**counted)
    settings = GrpcConfig(retry_after_s=0.001)
    with running_grpc(
        lambda: create_grpc_server(site.engine, metrics=site.metrics, config=settings)
    ) as address:
        with grpc.insecure_channel(address, [("grpc.service_config", config)]) as channel:
            site.double.error = DeviceFailed("A device works, this one failed; wait.", lasting=lasting)
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/{SERVICE}/ModelInfer")(
                    infer_request("double", [X8]).SerializeToString()
                )
    assert site.requests(**counted) == before + tries
