"""gRPC around the inference: health, reflection, deadlines, cancels, statuses, sizes, counts."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from servax.server import errors
from servax.server.fake import FakeEngine, doubler
from servax.server.rpc.messages import MESSAGES, SERVICE
from servax.server.rpc.service import bind, create_grpc_server
from servax.server.rpc.testing import Refusal, infer_request, running_grpc
from tritonclient.utils import InferenceServerException

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
REQUEST = infer_request("double", [X8], id="r1")


def leaves(root: type[errors.ServerError]) -> Iterator[type[errors.ServerError]]:
    yield root
    for child in root.__subclasses__():
        yield from leaves(child)


def until(true: Callable[[], bool]) -> None:
    """Waits until something that happens in another thread has happened."""
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s, "did not happen within 10 s"
        time.sleep(0.001)


@pytest.fixture
def health(site: Any) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(site.channel)


@pytest.fixture
def held(site: Any) -> Iterator[Any]:
    """A site whose model `double` waits for a device."""
    site.double.hold()
    yield site
    site.double.release()


def test_health_follows_readiness(site: Any, health: health_pb2_grpc.HealthStub) -> None:
    def statuses() -> list[int]:
        names = ("", SERVICE, f"{SERVICE}/warm", "double")
        return [health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names]

    assert statuses() == [SERVING] * 4
    site.engine.cool(3)
    assert statuses() == [NOT_SERVING] * 4
    assert not site.client.is_server_ready()
    assert site.client.is_server_live()
    assert not site.client.is_model_ready("double")
    site.engine.heat()
    assert statuses() == [SERVING] * 4
    site.engine.live = False
    assert statuses() == [NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert not site.client.is_server_live()
    site.engine.live = True
    site.engine.draining = True
    assert statuses() == [NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert not site.client.is_server_ready()
    site.engine.draining = False
    with pytest.raises(grpc.RpcError, match="got 'no'") as caught:
        health.Check(health_pb2.HealthCheckRequest(service="no"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_can_be_watched(site: Any, health: health_pb2_grpc.HealthStub) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest(service="double"), timeout=30)
    assert next(watch).status == SERVING
    site.engine.cool(0)
    assert next(watch).status == NOT_SERVING
    site.engine.heat()
    assert next(watch).status == SERVING
    site.engine.draining = True
    assert [one.status for one in watch] == [NOT_SERVING]
    site.engine.draining = False
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="no"), timeout=30)
    assert next(unknown).status == SERVICE_UNKNOWN
    unknown.cancel()


def test_reflection_describes_every_service(site: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(site.channel)
    names = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE}
    assert set(database.get_services()) == names
    pool = DescriptorPool(database)
    methods = pool.FindServiceByName(SERVICE).methods_by_name
    assert set(methods) == {
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelInfer",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
    }
    assert methods["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7
    assert set(pool.FindServiceByName("grpc.health.v1.Health").methods_by_name) >= {"Check", "Watch"}


def test_not_ready_says_how_far_it_is_and_when_to_retry(site: Any) -> None:
    site.engine.cool(3)
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.reason, refusal.request_id) == ("UNAVAILABLE", "not_ready", "r1")
    assert "3 of 29" in refusal.message
    assert dict(refusal.info.metadata) == {"state": "warming", "done": "3", "total": "29"}
    assert (refusal.retry_s, refusal.pushback_ms) == (2.0, "2000")


def test_a_draining_server_refuses(site: Any) -> None:
    site.engine.draining = True
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    site.engine.draining = False
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.reason, refusal.retry_s) == ("UNAVAILABLE", "closed", 2.0)


@pytest.mark.parametrize("kind", list(leaves(errors.ServerError)), ids=lambda kind: kind.__name__)
def test_every_error_has_its_status_and_reason(site: Any, kind: type[errors.ServerError]) -> None:
    site.double.error = kind("The rule is that, got this; do so.")
    before = site.requests(model="double", outcome="error", reason=kind.reason)
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.reason) == (kind.grpc_status, kind.reason)
    assert refusal.message == "The rule is that, got this; do so."
    assert (refusal.pushback_ms is not None) == issubclass(kind, errors.Overloaded | errors.Unavailable)
    assert site.requests(model="double", outcome="error", reason=kind.reason) == before + 1


def test_overload_says_when_to_retry(site: Any) -> None:
    site.double.error = errors.Overloaded("A queue holds 64 rows, got 65; retry later.", retry_after_s=0.25)
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.retry_s, refusal.pushback_ms) == ("RESOURCE_EXHAUSTED", 0.25, "250")


def test_what_does_not_pass_by_itself_advises_no_retry(site: Any) -> None:
    site.double.error = errors.DeviceFailed("A device works, this one failed; restart it.", lasting=True)
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.retry_s, refusal.pushback_ms) == ("UNAVAILABLE", 0.0, "-1")


def test_a_fault_of_ours_is_internal_and_tells_nothing(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.double.error = RuntimeError("secret")
    with pytest.raises(grpc.RpcError) as caught:
        site.send(REQUEST)
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.reason) == ("INTERNAL", "internal")
    assert "secret" not in refusal.message
    assert "secret" in caplog.text


def test_long_names_do_not_break_the_trailers(site: Any) -> None:
    name = "ä" * 50_000
    refusal = site.refused(infer_request(name, [X8], id="i" * 5000), "NOT_FOUND", "unknown_model")
    assert "[...]" in refusal.message
    assert len(refusal.message.encode()) < 1100
    assert refusal.request_id == ""
    refusal = site.refused(infer_request("double", [X8 | {"name": "x\r\n"}], id="ü" * 128))
    assert "'x\\r\\n'" in refusal.message
    assert refusal.request_id == "ü" * 128


def test_M1_counts_what_the_client_got(site: Any) -> None:
    ok = {"model": "double", "outcome": "ok", "reason": ""}
    failed = {"model": "double", "outcome": "error", "reason": "model"}
    before = site.requests(**ok), site.requests(**failed)
    site.send(REQUEST)
    site.double.error = errors.ModelError("The model must not fail, got an error; report it.")
    with pytest.raises(grpc.RpcError):
        site.send(REQUEST)
    site.double.error = None
    site.send(REQUEST)
    assert (site.requests(**ok), site.requests(**failed)) == (before[0] + 2, before[1] + 1)
    total = site.metrics.value("servax_request_seconds_count", model="double", route="grpc")
    assert total >= 3


def test_X1_a_cancel_frees_the_place_at_once(held: Any) -> None:
    cancelled = {"model": "double", "outcome": "cancelled", "reason": "cancelled"}
    before = held.requests(**cancelled)
    took_s = []
    for _ in range(5):  # the best of them: a busy machine may take the thread away for longer
        held.double.entered.clear()
        held.double.abandoned.clear()
        call = held.call().future(REQUEST.SerializeToString())
        assert held.double.entered.wait(10)
        start_s = time.monotonic()
        call.cancel()
        assert held.double.abandoned.wait(10)
        took_s.append(time.monotonic() - start_s)
    assert min(took_s) < 0.05
    until(lambda: held.requests(**cancelled) == before + 5)


def test_a_client_that_vanishes_frees_its_place(held: Any) -> None:
    channel = grpc.insecure_channel(held.address, options=[("grpc.use_local_subchannel_pool", 1)])
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(REQUEST.SerializeToString())
    assert held.double.entered.wait(10)
    channel.close()
    assert held.double.abandoned.wait(10)
    assert call.code() is grpc.StatusCode.CANCELLED


def test_a_deadline_passes_and_is_counted_as_one(held: Any) -> None:
    late = {"model": "double", "outcome": "error", "reason": "deadline"}
    before = held.requests(**late)
    with pytest.raises(grpc.RpcError) as caught:
        held.send(REQUEST, timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert held.double.abandoned.wait(10)
    until(lambda: held.requests(**late) == before + 1)
    assert 0 < held.double.options[-1][1] <= 0.102


@pytest.mark.parametrize(
    ("deadline_s", "timeout_us", "expected_s"),
    [(None, 0, None), (None, 50_000, 0.05), (10.0, 50_000, 0.05), (5.0, 0, 5.0), (5.0, 60_000_000, 5.0)],
)
def test_Q2_the_smallest_timeout_that_is_set_counts(
    site: Any, deadline_s: float | None, timeout_us: int, expected_s: float | None
) -> None:
    request = infer_request("double", [X8], parameters={"timeout": timeout_us})
    site.send(request, timeout=deadline_s)
    (found_s,) = [timeout_s for _, timeout_s in site.double.options]
    assert found_s == expected_s if deadline_s is None else expected_s * 0.8 < found_s <= expected_s * 1.02


def test_Q5_priority_and_timeout_reach_the_engine(site: Any) -> None:
    x = triton.InferInput("x", [1, 8], "FP32")
    x.set_data_from_numpy(np.ones((1, 8), np.float32))
    site.client.infer("double", [x], priority=2, timeout=1_500_000)
    site.send(infer_request("double", [X8], parameters={"priority": 9}), timeout=3)
    assert site.double.options[0] == (2, 1.5)
    assert site.double.options[1][0] == 9
    assert 2 < site.double.options[1][1] <= 3.06


def test_message_size_limits(site: Any) -> None:
    too_large = {"model": "", "outcome": "error", "reason": "payload_too_large"}
    before = site.requests(**too_large)
    half = infer_request("double", [X8 | {"data": bytes(200_001)}])
    refusal = site.refused(half, "RESOURCE_EXHAUSTED", "payload_too_large")
    assert "at most 200000 bytes" in refusal.message
    assert site.requests(**too_large) == before + 1
    huge = infer_request("double", [X8 | {"data": bytes(50_000_000)}]).SerializeToString()
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        with pytest.raises(grpc.RpcError) as caught:
            site.send(huge, compression=compression)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        site.check_healthy()
    fits = infer_request("ragged", [X8 | {"shape": [64, 64], "data": bytes(64 * 64 * 4)}])
    assert len(site.send(fits).raw_output_contents[0]) == 64 * 64 * 4


def test_a_port_is_taken_once(site: Any) -> None:
    async def second() -> None:
        server = create_grpc_server(FakeEngine(doubler()))
        with pytest.raises(errors.ConfigError, match="needs a free address"):
            bind(server, *site.address.split(":"))
        await server.stop(None)

    asyncio.run(second())


def test_stopping_lets_admitted_calls_end(site: Any) -> None:
    model = doubler()
    model.hold()
    with running_grpc(lambda: create_grpc_server(FakeEngine(model))) as address:
        channel = grpc.insecure_channel(address)
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(REQUEST.SerializeToString())
        assert model.entered.wait(10)
        model.release()
    assert MESSAGES["ModelInferResponse"].FromString(call.result()).id == "r1"
    channel.close()


def test_methods_that_are_not_ours_are_unimplemented(site: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        site.client.get_model_config("double")
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
