"""Calls that the event loop cannot begin in time are refused before they are parsed."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from servax.server.config import GrpcConfig
from servax.server.errors import Overloaded
from servax.server.fake import FakeEngine, doubler
from servax.server.http.gate import Gate
from servax.server.metrics import Metrics
from servax.server.rpc.call import GrpcCall, Method
from servax.server.rpc.testing import Refusal


class Ended(Exception):
    """What gRPC raises when a call is aborted."""


class Context:
    """gRPC's object of a call, in the test's hands."""

    def __init__(self, left_s: float | None = None) -> None:
        self.left_s = left_s
        self.said: tuple[Any, ...] = ()

    def time_remaining(self) -> float | None:
        return self.left_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Any) -> None:
        self.said = code, message, dict(trailers)
        raise Ended


class Site:
    """One method behind a gate."""

    def __init__(self) -> None:
        self.metrics, self.gate, self.parsed = Metrics(), Gate(1.0), 0
        self.gate = Gate(1.0, self.metrics.unread)
        engine = FakeEngine(doubler())
        self.method = Method(self.handle, engine, 2.0, self.metrics, gate=self.gate)
        self.error: Overloaded | None = None

    async def handle(self, raw: bytes, call: GrpcCall) -> bytes:
        self.parsed += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return raw

    async def send(self, context: Context) -> bytes | None:
        try:
            return await self.method(b"x", context)
        except Ended:
            return None


def in_loop(work: Callable[[Site], Any]) -> None:
    asyncio.run(work(Site()))


def test_O1_calls_that_begin_in_one_turn_are_only_as_many_as_begin_in_time() -> None:
    async def go(site: Site) -> None:
        for _ in range(200):
            site.gate.enter(0.0)
            site.gate.begun(0, 0.001)
            site.gate.allowed(0.1)
        contexts = [Context(0.1) for _ in range(100)]
        answers = await asyncio.gather(*[site.send(one) for one in contexts])
        assert site.parsed == 100 - answers.count(None)
        assert 20 <= site.parsed <= 22
        code, message, trailers = contexts[-1].said
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "must begin within 0.02 s, got 21 before it" in message
        assert (trailers["servax-reason"], trailers["grpc-retry-pushback-ms"]) == ("overloaded", "1000")
        await asyncio.sleep(0)
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
