"""Which requests are refused unread, what they hear, and from when a caller's time runs."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from servax.server.config import HttpConfig
from servax.server.errors import DeadlineExceeded
from servax.server.http.gate import CAME, Gate
from servax.server.http.protocol import HttpProtocol
from servax.server.http.testing import Wire
from servax.server.http.wire import Call
from uvicorn.server import ServerState

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


# -- the decision, in time that the test makes ---------------------------------------------------------


def saturate(
    gate: Gate, *, seconds: float, rate: float, begin_s: float, room: float, turn_s: float
) -> list[float]:
    """A loop whose turns begin what was read before; returns the lags of those that began.

    Args:
        gate: under test.
        seconds: of load.
        rate: newcomers a second.
        begin_s: what one costs the loop until it begins.
        room: those a second for whom there is room further in; the rest is refused there.
        turn_s: least seconds between two turns.
    """
    now_s, lags, came, taken = 0.0, [], 0.0, 0.0
    while now_s < seconds:
        came += rate * turn_s
        entered = [ahead for ahead in (gate.enter(now_s) for _ in range(int(came))) if ahead is not None]
        came -= int(came)
        spent_s = 0.0
        taken = min(taken + room * max(turn_s, len(entered) * begin_s), room * 0.01)
        for ahead in entered:
            spent_s += begin_s
            gate.begun(ahead, spent_s)
            lags.append(spent_s)
            fits = taken >= 1
            taken -= fits
            gate.allowed(0.1, refused=not fits)
        now_s += max(turn_s, spent_s)
    return lags


def test_an_idle_loop_refuses_nobody_whatever_was_measured() -> None:
    gate = Gate(1.0)
    for step in range(200):
        ahead = gate.enter(float(step))
        assert ahead == 0
        gate.begun(0, 30.0)  # the process was stopped, say
        gate.allowed(0.001)


def test_O1_what_begins_does_so_within_a_share_of_what_callers_allow() -> None:
    gate = Gate(1.0)
    lags = saturate(gate, seconds=5.0, rate=20_000, begin_s=2e-4, room=1e9, turn_s=0.005)
    assert gate.bound_s == pytest.approx(0.02)  # a fifth of 100 ms
    late = lags[len(lags) // 2 :]
    assert max(late) <= 0.025
    assert len(lags) >= 0.9 * 5.0 / 2e-4 / 1.05  # and the loop is not left idle for that


def test_O1_while_the_loop_is_busy_few_begin_in_vain() -> None:
    gate = Gate(1.0)
    began = len(saturate(gate, seconds=5.0, rate=20_000, begin_s=2e-4, room=1000, turn_s=0.005))
    assert 5000 <= began <= 0.6 * 25_000  # all of the loop's time would begin 25,000


def test_where_the_device_is_short_and_not_the_loop_all_begin() -> None:
    """Further in a full queue knows of priorities, and drops the least urgent."""
    gate = Gate(1.0)
    began = len(saturate(gate, seconds=5.0, rate=500, begin_s=1e-4, room=20, turn_s=0.001))
    assert began >= 0.95 * 2500


def test_one_pause_of_the_process_refuses_no_burst() -> None:
    gate = Gate(1.0)
    for step in range(100):
        gate.begun(gate.enter(step * 0.01) or 0, 2e-4)
        gate.allowed(0.1)
    gate.begun(gate.enter(2.0) or 0, 5.0)
    entered = [gate.enter(7.0) for _ in range(50)]
    assert None not in entered


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 10), st.none() | st.floats(1e-9, 1e9))))
def test_the_count_of_those_ahead_is_that_of_those_not_begun(
    steps: list[tuple[float, float, float | None]],
) -> None:
    gate, now_s, inside = Gate(1.0), 0.0, []
    for after_s, lag_s, allowed_s in steps:
        now_s += after_s
        ahead = gate.enter(now_s)
        assert ahead == (None if ahead is None else len(inside))
        assert (ahead is not None) or inside
        if ahead is not None:
            inside.append(ahead)
        if lag_s > 5 and inside:
            gate.begun(inside.pop(), lag_s)
            gate.allowed(allowed_s, refused=lag_s > 8)
        assert 0.005 - 1e-9 <= gate.bound_s <= 1.0 + 1e-9
    assert gate.ahead == len(inside)


# -- the protocol, over a transport that the test holds ------------------------------------------------


def post(path: str = "/v2/models/double/infer", more: str = "", body: bytes | None = None) -> bytes:
    data = json.dumps({"inputs": [X8]}).encode() if body is None else body
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def connections(app: FastAPI, count: int = 1) -> Iterator[list[tuple[HttpProtocol, Wire]]]:
    """Connections to the application in the running loop."""
    config = uvicorn.Config(app, http=HttpProtocol, ws="none", log_level="error")
    config.load()
    made = []
    for _ in range(count):
        protocol, wire = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop()), Wire()
        protocol.connection_made(wire)
        made.append((protocol, wire))
    yield made
    for protocol, _ in made:
        protocol.connection_lost(None)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen in 10,000 turns of the loop")


def closed_gate(app: FastAPI) -> Gate:
    gate: Gate = app.state.servax_refusals.gate
    gate.ahead = 10**6
    return gate


@pytest.mark.parametrize("path", ["/v2/models/double/infer", "/v1/embeddings"])
def test_O1_a_refusal_has_status_reason_advice_and_the_id(site: Any, path: str) -> None:
    async def go() -> None:
        with connections(site.app) as [(protocol, wire)]:
            closed_gate(site.app)
            protocol.data_received(post(path, "x-request-id: mine\r\n") + post(path))
            (status, headers, body), second = wire.answers()  # at once, in no later turn of the loop
            assert (status, headers["retry-after"], headers["x-request-id"]) == (429, "1", "mine")
            assert len(second[1]["x-request-id"]) == 32
            error = body["error"]
            message, reason = (
                (error, body["reason"]) if isinstance(error, str) else (error["message"], error["code"])
            )
            assert reason == "overloaded"
            assert "must begin within 1 s, got 1000000 before it" in message
            assert "; retry after 1 s" in message
            await until(
                lambda: site.requests(model="", route="unread", outcome="error", reason="overloaded") == 2
            )
            assert site.metrics.value("servax_shed_total", model="", cause="lag") == 2

    asyncio.run(go())


def test_the_body_of_a_refused_request_is_dropped_and_its_connection_goes_on(site: Any) -> None:
    async def go() -> None:
        with connections(site.app) as [(protocol, wire)]:
            gate = closed_gate(site.app)
            request = post(body=b"x" * 100_000)
            protocol.data_received(request[:200])
            assert [status for status, *_ in wire.answers()] == [429]
            for at in range(200, len(request), 10_000):
                protocol.data_received(request[at : at + 10_000])
            gate.ahead = 0
            protocol.data_received(post())
            await until(lambda: len(wire.answers()) == 2)
            assert wire.answers()[1][2]["outputs"][0]["data"] == [3.0] * 8
            assert (gate.ahead, wire.closed) == (0, False)

    asyncio.run(go())


def test_a_connection_that_ends_with_its_request_is_closed_after_it(site: Any) -> None:
    async def go() -> None:
        with connections(site.app) as [(protocol, wire)]:
            closed_gate(site.app)
            request = post(more="connection: close\r\n")
            protocol.data_received(request[:-1])
            assert not wire.closed
            protocol.data_received(request[-1:])
            assert wire.closed
            assert wire.answers()[0][1]["connection"] == "close"

    asyncio.run(go())


def test_probes_and_requests_behind_others_on_their_connection_are_let_in(site: Any) -> None:
    async def go() -> None:
        with connections(site.app) as [(protocol, wire)]:
            protocol.data_received(post())
            gate = closed_gate(site.app)
            protocol.data_received(post() + b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: len(wire.answers()) == 3)
            assert [status for status, *_ in wire.answers()] == [200] * 3
            assert gate.ahead == 10**6 - 1

    asyncio.run(go())


def test_O1_a_loop_that_stood_still_begins_no_more_than_it_can(site: Any) -> None:
    """Hundreds of requests are read in one turn; each would need 1 ms to begin, callers allow 100 ms."""

    async def go() -> None:
        with connections(site.app, 300) as made:
            gate: Gate = site.app.state.servax_refusals.gate
            for _ in range(200):
                gate.enter(0.0)
                gate.begun(0, 0.001)
                gate.allowed(0.1)
            for protocol, _ in made:
                protocol.data_received(post())
            refused = sum(len(wire.answers()) for _, wire in made)
            assert gate.ahead + refused == 300
            assert 20 <= gate.ahead <= 22
            await until(lambda: all(wire.seen for _, wire in made))
            statuses = [wire.answers()[0][0] for _, wire in made]
            assert statuses.count(200) == 300 - refused
            assert gate.ahead == 0

    asyncio.run(go())


# -- from when a caller's time runs -------------------------------------------------------------------


def test_a_callers_time_runs_from_the_arrival() -> None:
    call = Call({}, {}, came_s=time.monotonic() - 0.75)
    assert call.left_s(None) is call.left_s(0) is None
    left_s = call.left_s(1.0)
    assert left_s is not None
    assert 0.1 < left_s <= 0.25
    with pytest.raises(DeadlineExceeded, match=r"got 0\.5 s from its arrival; allow more"):
        call.left_s(0.5)


def test_O1_what_was_read_too_long_ago_is_not_run(site: Any) -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await site.app({**scope, CAME: (time.monotonic() - 0.2, 0)}, receive, send)

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=late)
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            body = {"inputs": [X8], "parameters": {"timeout": 100_000}}
            return await client.post("/v2/models/double/infer", json=body)

    answer = asyncio.run(go())
    assert (answer.status_code, answer.json()["reason"]) == (504, "deadline")
    assert not site.double.calls
    site.check_healthy()


def test_the_bound_is_an_option() -> None:
    assert HttpConfig(most_lag_s=0.25).most_lag_s == 0.25
    with pytest.raises(ValueError, match="greater than 0"):
        HttpConfig(most_lag_s=0)
