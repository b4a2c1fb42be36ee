"""Whatever a connection does, the gate's count holds, answers stay in order, and writes stay bounded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from servax.server.http.gate import Gate
from servax.server.http.protocol import HttpProtocol, without_offer
from servax.server.http.testing import Wire
from uvicorn.server import ServerState

PATH = b"/v2/models/double/infer"
BODY = b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":[1,1,1,1,1,1,1,1]}]}'
REFUSED = b"HTTP/1.1 429 "


def post(more: bytes = b"", *, target: bytes = PATH, version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (target, version, more, len(BODY)) + BODY


@contextmanager
def connection(app: FastAPI, **options: Any) -> Iterator[tuple[HttpProtocol, Wire, Gate]]:
    config = uvicorn.Config(app, http=HttpProtocol, ws="none", log_level="critical", **options)
    config.load()
    protocol, wire = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop()), Wire()
    protocol.connection_made(wire)
    yield protocol, wire, app.state.servax_refusals.gate
    protocol.connection_lost(None)


async def until(wire: Wire, words: bytes, count: int = 1) -> None:
    for _ in range(10_000):
        if wire.seen.count(words) >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{words!r} was not written {count} times: {wire.seen!r}")


def close_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "enter", lambda gate, now_s: None)


@pytest.mark.parametrize("target", [b"http://host", b"//[", b"/\xff"])
def test_a_target_that_is_none_leaves_the_count_alone(site: Any, target: bytes) -> None:
    async def go() -> None:
        for _ in range(3):
            with connection(site.app) as (protocol, wire, gate):
                protocol.data_received(post(target=target))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert wire.seen.startswith(b"HTTP/1.1 4")
                assert gate.ahead == 0

    asyncio.run(go())


def test_what_uvicorn_answers_itself_leaves_the_count_alone(site: Any) -> None:
    async def go() -> None:
        with connection(site.app, limit_concurrency=1) as (protocol, wire, gate):
            protocol.data_received(post())
            await until(wire, b"503")
            assert gate.ahead == 0

    asyncio.run(go())


def test_an_application_that_begins_at_once_is_counted_once(site: Any) -> None:
    """As the eager tasks of Python 3.12 do."""

    async def go() -> None:
        with connection(site.app) as (protocol, _, gate):
            begun = []

            def start(cycle: Any, app: Any) -> None:
                step = app(cycle.scope, cycle.receive, cycle.send)
                with pytest.raises(StopIteration):
                    step.send(None)
                begun.append(gate.ahead)

            async def inner(scope: Any, receive: Any, send: Any) -> None: ...

            protocol.app._app = inner  # type: ignore[union-attr]
            protocol._start_asgi_task = start  # type: ignore[method-assign]
            protocol.data_received(post())
            assert begun == [0]

    asyncio.run(go())


def test_a_client_that_left_before_its_request_began_is_counted_out(site: Any) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, _, gate):
            protocol.data_received(post())
            assert gate.ahead == 1
        for _ in range(50):
            await asyncio.sleep(0)
        assert gate.ahead == 0

    asyncio.run(go())


def test_a_request_for_another_protocol_is_refused_once_at_most(site: Any) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, gate):
            protocol.data_received(post(b"connection: upgrade\r\nupgrade: h2c\r\n"))
            await until(wire, b"HTTP/1.1 ")
            assert (wire.seen.count(b"HTTP/1.1 "), gate.ahead) == (1, 0)

    asyncio.run(go())


def test_a_chunked_body_of_a_refused_request_is_dropped(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, _), monkeypatch.context() as patch:
            close_gate(patch)
            head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            for part in (head, b"5\r\nhello\r\n", b"3\r\nyou\r\n0\r\n\r\n"):
                protocol.data_received(part)
            patch.undo()
            protocol.data_received(post())
            await until(wire, b"HTTP/1.1 200 ")
            assert wire.seen.startswith(REFUSED)
            assert wire.seen.count(b"HTTP/1.1 ") == 2

    asyncio.run(go())


def test_a_client_of_http_1_0_sees_the_end_of_a_refusal(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, _):
            close_gate(monkeypatch)
            protocol.data_received(post(b"connection: keep-alive\r\n", version=b"1.0"))
            assert b"\r\nconnection: close\r\n" in wire.seen
            assert wire.closed

    asyncio.run(go())


def test_who_waits_for_100_and_is_refused_need_not_send_its_body(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it sends next would be taken for the body."""

    async def go() -> None:
        with connection(site.app, timeout_keep_alive=0) as (protocol, wire, _):
            close_gate(monkeypatch)
            protocol.data_received(post(b"expect: 100-continue\r\n")[: -len(BODY)])
            assert wire.seen.startswith(REFUSED)
            assert b"\r\nconnection: close\r\n" in wire.seen
            for _ in range(1000):
                if wire.closed:
                    return
                await asyncio.sleep(0)
            raise AssertionError("the connection was left open")

    asyncio.run(go())


def test_a_refusal_goes_out_behind_a_head_that_is_kept(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, _):
            protocol.data_received(b"HEAD /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            close_gate(monkeypatch)
            for _ in range(1000):
                if protocol.cycle.response_complete:
                    break
                await asyncio.sleep(0)
            assert not wire.seen  # this is the turn in which the head is kept
            protocol.data_received(post())
            assert wire.seen.find(b" 405 ") < wire.seen.find(b" 429 ")
            assert b" 405 " in wire.seen

    asyncio.run(go())


def test_who_reads_no_refusals_is_read_from_no_more(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, _):
            close_gate(monkeypatch)
            protocol.data_received(post())
            assert not wire.paused
            protocol.pause_writing()
            protocol.data_received(post())
            assert wire.paused
            protocol.resume_writing()
            assert not wire.paused

    asyncio.run(go())


# -- the decision -------------------------------------------------------------------------------------


def wave(gate: Gate, now_s: float, count: int, *, before_s: float = 0.0, timeout_s: float = 0.1) -> int:
    """So many are read together and begin 0.1 ms after each other; how many were refused unread."""
    inside = [gate.enter(now_s) for _ in range(count)]
    for place, ahead in enumerate(one for one in inside if one is not None):
        lag_s = before_s + 1e-4 * (place + 1)
        gate.begun(ahead, lag_s)
        gate.allowed(timeout_s, refused=lag_s > timeout_s)
    return inside.count(None)


@pytest.mark.parametrize("every_s", [0.01, 0.1, 0.5])
def test_a_pause_that_many_share_refuses_nobody_after(every_s: float) -> None:
    gate = Gate(1.0)
    for step in range(100):
        assert wave(gate, step * every_s, 32) == 0
    now_s = 100 * every_s
    wave(gate, now_s, 32, before_s=3.0)  # a collection of garbage, say: all of them come too late
    assert [wave(gate, now_s + 3.0 + step * every_s, 32) for step in range(20)] == [0] * 20


def test_a_pause_at_the_very_start_refuses_nobody_after() -> None:
    gate = Gate(1.0)
    wave(gate, 0.0, 64, before_s=5.0)
    assert [wave(gate, 5.0 + step * 0.1, 64) for step in range(5)] == [0] * 5


@pytest.mark.parametrize(
    ("offer", "kept"),
    [
        (b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", b""),
        (b"upgrade:h2c\r\nConnection: keep-alive, upgrade\r\n", b"connection: keep-alive\r\n"),
    ],
)
def test_an_offer_of_http_2_is_passed_over(site: Any, offer: bytes, kept: bytes) -> None:
    head = post(offer).partition(b"\r\n\r\n")[0]
    assert without_offer(head) == post(kept).partition(b"\r\n\r\n")[0]

    async def go() -> None:
        with connection(site.app) as (protocol, wire, _):
            for number in range(3):  # head and body together, and apart; the connection lives on
                whole = post(offer)
                cut = len(whole) - (len(BODY) if number else 0)
                protocol.data_received(whole[:cut])
                if number:
                    protocol.data_received(whole[cut:])
                await until(wire, b"HTTP/1.1 200", number + 1)

    asyncio.run(go())


def test_a_body_that_speaks_of_upgrades_is_left_alone(site: Any) -> None:
    async def go() -> None:
        with connection(site.app) as (protocol, wire, _):
            body = b"x\r\nupgrade: h2c\r\n\r\ny"
            protocol.data_received(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH, len(body))
            )
            protocol.data_received(body)
            await until(wire, b"HTTP/1.1 400")
            protocol.data_received(post())
            await until(wire, b"HTTP/1.1 200")

    asyncio.run(go())
