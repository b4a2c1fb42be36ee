"""Calls that the event loop cannot begin in time are refused before they are parsed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from servax.server.config import GrpcConfig
from servax.server.errors import Overloaded
from servax.server.fake import FakeEngine, doubler
from servax.server.http.gate import Gate
from servax.server.metrics import Metrics
from servax.server.rpc.call import Gated, GrpcCall
from servax.server.rpc.lag import Lag, LagGate
from servax.server.rpc.messages import SERVICE
from servax.server.rpc.service import create_grpc_server
from servax.server.rpc.testing import Refusal, infer_request, running_grpc


class Ended(grpc.aio.AbortError):  # type: ignore[misc]
    """What gRPC raises when a call is aborted."""


class Context:
    """gRPC's object of a call, in the test's hands."""

    def __init__(self, left_s: float | None = None, message: Any = b"x") -> None:
        self.left_s = left_s
        self.message = message
        self.said: tuple[Any, ...] = ()

    def time_remaining(self) -> float | None:
        return self.left_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def read(self) -> Any:
        return self.message

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Any) -> None:
        self.said = code, message, dict(trailers)
        raise Ended


class Site:
    """One method behind a gate whose clock is the test's."""

    def __init__(self) -> None:
        self.metrics, self.parsed, self.now_s = Metrics(), 0, 100.0
        self.lag = Lag(lambda: self.now_s)
        self.gate = LagGate(self.lag, 1.0, self.metrics.unread)
        self.method = Gated(self.gate, self.handle, FakeEngine(doubler()), 2.0, self.metrics)
        self.error: Overloaded | None = None

    async def handle(self, raw: bytes, call: GrpcCall) -> bytes:
        self.parsed += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return raw

    async def send(self, context: Context) -> bytes | None:
        try:
            return await self.method(None, context)
        except Ended:
            return None

    def ask(self) -> "asyncio.Task[None]":
        """Starts to ask how long calls wait; the answer comes when the test says."""
        self.asked: list[Any] = []
        self.handed = asyncio.Event()

        async def call(metadata: Any) -> None:
            self.asked.append(metadata)
            await self.handed.wait()

        return asyncio.create_task(self.lag.run(call))


def in_loop(work: Callable[[Site], Any]) -> None:
    asyncio.run(work(Site()))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_O1_calls_that_begin_together_are_only_as_many_as_begin_in_time() -> None:
    async def go(site: Site) -> None:
        for _ in range(200):
            site.gate.enter(0.0)
            site.gate.begun(0, 0.001)
            site.gate.allowed(0.1)
        contexts = [Context(0.1) for _ in range(100)]
        answers = await asyncio.gather(*[site.send(one) for one in contexts])
        assert site.parsed == 100 - answers.count(None)
        assert 20 <= site.parsed <= 30
        code, message, trailers = contexts[-1].said
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "must begin within 0.02 s" in message
        assert (trailers["servax-reason"], trailers["grpc-retry-pushback-ms"]) == ("overloaded", "1000")
        site.gate.flush()
        assert site.metrics.value("servax_shed_total", model="", cause="lag") == 100 - site.parsed
        assert site.gate.ahead == 0
        assert await site.send(Context()) == b"x"

    in_loop(go)


def test_calls_that_come_one_by_one_are_all_let_in() -> None:
    async def go(site: Site) -> None:
        site.error = Overloaded("a queue holds at most 1 row; got 2: retry")
        for _ in range(300):
            await site.send(Context(0.05))
        assert site.parsed == 300

    in_loop(go)


def test_O1_a_call_of_our_own_that_waits_too_long_refuses_the_others() -> None:
    async def go(site: Site) -> None:
        asking = site.ask()
        for _ in range(100):
            await site.send(Context(0.1))
        await turns()
        assert len(site.asked) == 1
        site.now_s += 0.06  # it has not been handed over, and callers allow 0.1 s
        assert site.lag.seconds == pytest.approx(0.06)
        late = Context(0.1)
        assert await site.send(late) is None
        assert late.said[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        site.handed.set()
        await turns()
        assert site.lag.seconds == pytest.approx(0.06)
        assert await site.send(Context(0.1)) is None
        site.now_s += 0.2  # nothing is known any more
        assert site.lag.seconds == 0.0
        assert await site.send(Context(0.1)) == b"x"
        assert site.gate.ahead == 0
        asking.cancel()

    in_loop(go)


def test_only_the_holder_of_the_token_says_how_long_calls_wait() -> None:
    async def go(site: Site) -> None:
        asking = site.ask()
        await site.send(Context())
        await turns()
        (metadata,) = site.asked
        site.now_s += 0.5

        class Other(Context):
            given: tuple[tuple[str, str], ...] = (("servax-token", "guess"),)

            def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
                return self.given

        handler = site.lag.handlers().service(Details("/servax.Lag/Ask"))
        other = Other()
        await handler.stream_unary(None, other)
        site.now_s += 0.5
        assert site.lag.seconds == pytest.approx(1.0)
        other.given = metadata
        await handler.stream_unary(None, other)
        site.now_s += 0.05
        assert site.lag.seconds == pytest.approx(1.0), "it arrived after 1 s"
        asking.cancel()

    in_loop(go)


class Details:
    """What gRPC tells of a call to find its handler."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def test_a_call_without_time_is_neither_read_nor_answered() -> None:
    async def go(site: Site) -> None:
        context = Context(0.0)
        with pytest.raises(asyncio.CancelledError):
            await site.method(None, context)
        assert (site.parsed, context.said) == (0, ())
        site.gate.flush()
        assert site.metrics.value("servax_shed_total", model="", cause="lag") == 1
        assert site.gate.ahead == 0

    in_loop(go)


def test_a_caller_who_leaves_the_line_leaves_nothing_behind() -> None:
    async def go(site: Site) -> None:
        tasks = [asyncio.create_task(site.send(Context(10.0))) for _ in range(40)]
        await asyncio.sleep(0)
        assert site.gate.ahead > 0
        for task in tasks[20:]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert answers[:20] == [b"x"] * 20
        assert all(isinstance(one, asyncio.CancelledError) for one in answers[20:])
        assert site.gate.ahead == 0
        cancelled = {"model": "", "route": "grpc", "outcome": "cancelled", "reason": "cancelled"}
        assert site.metrics.value("servax_requests_total", **cancelled) == 20
        assert await site.send(Context(10.0)) == b"x"

    in_loop(go)


def test_a_call_that_is_cancelled_before_its_message_is_counted_as_that() -> None:
    async def go(site: Site) -> None:
        task = asyncio.create_task(site.send(Context(10.0, grpc.aio.EOF)))
        await turns()
        task.cancel()  # as gRPC does, right after it told that no message will come
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (site.parsed, site.gate.ahead) == (0, 0)
        cancelled = {"model": "", "route": "grpc", "outcome": "cancelled", "reason": "cancelled"}
        assert site.metrics.value("servax_requests_total", **cancelled) == 1

    in_loop(go)


def test_a_call_that_brings_no_message_is_refused_and_does_not_stay_open(site: Any) -> None:
    call = site.channel.stream_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        call(iter(()), timeout=10)
    assert (caught.value.code().name, Refusal(caught.value).reason) == ("INVALID_ARGUMENT", "bad_request")
    site.check_healthy()


def test_over_a_socket_we_ask_while_calls_come(site: Any) -> None:
    asked: list[float] = []
    real = Lag._arrived

    def arrived(lag: Lag) -> None:
        real(lag)
        asked.append(lag.seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lag, "_arrived", arrived)
        end_s = time.monotonic() + 10
        while not asked and time.monotonic() < end_s:
            site.check_healthy()
    assert asked
    assert asked[0] < 10


def test_without_a_place_for_a_socket_the_server_serves_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def none(**options: Any) -> None:
        raise FileNotFoundError("no usable temporary directory")

    engine = FakeEngine(doubler())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("servax.server.rpc.lag.tempfile.TemporaryDirectory", none)
        with (
            running_grpc(lambda: create_grpc_server(engine)) as address,
            grpc.insecure_channel(address) as channel,
        ):
            x = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            assert call(infer_request("double", [x]).SerializeToString())
    assert "no usable temporary directory" in caplog.text


def test_while_calls_are_refused_probes_are_answered(monkeypatch: pytest.MonkeyPatch, site: Any) -> None:
    monkeypatch.setattr(Gate, "enter", lambda gate, now_s: None)
    assert site.client.is_server_live()
    assert site.client.is_server_ready()
    assert site.client.is_model_ready("double")
    assert site.client.get_model_metadata("double").name == "double"
    health = health_pb2_grpc.HealthStub(site.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_over_a_socket_a_refusal_has_code_reason_and_advice(
    monkeypatch: pytest.MonkeyPatch, site: Any
) -> None:
    monkeypatch.setattr(Gate, "enter", lambda gate, now_s: None)
    with pytest.raises(grpc.RpcError) as caught:
        site.send(b"no message at all")
    refusal = Refusal(caught.value)
    assert (refusal.code, refusal.reason, refusal.retry_s) == ("RESOURCE_EXHAUSTED", "overloaded", 1.0)
    assert refusal.pushback_ms == "1000"
    monkeypatch.undo()
    site.check_healthy()


def test_the_bound_is_an_option() -> None:
    assert GrpcConfig(most_lag_s=0.25).most_lag_s == 0.25
    with pytest.raises(ValueError, match="greater than 0"):
        GrpcConfig(most_lag_s=0)
