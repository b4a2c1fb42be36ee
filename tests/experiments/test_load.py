"""Open-loop load: when requests leave, from when they are timed, and what is made of it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.experiments import load
from servax.experiments.errors import ExperimentError
from servax.experiments.grpc_load import infer_call
from servax.experiments.load_figure import draw_load
from servax.experiments.open_loop import Outcome, Sender, poisson, saturated
from servax.experiments.traces import load_trace
from servax.server.errors import Overloaded
from servax.server.fake import FakeEngine, doubler
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.rpc.service import create_grpc_server
from servax.server.rpc.testing import running_grpc

TRACE = load_trace("azure_llm_2023_conv")
MODEL = {
    "name": "ragged",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
    "limits": {"length": 64, "batch": 8},
}


@given(rate=st.floats(10, 2000), seconds=st.floats(1, 5), seed=st.integers(0, 99))
def test_poisson_arrivals_rise_and_meet_their_rate(rate: float, seconds: float, seed: int) -> None:
    times = poisson(rate, seconds, seed)
    assert (np.diff(times) >= 0).all()
    assert times.max(initial=0.0) < seconds
    assert abs(len(times) - rate * seconds) < 6 * (rate * seconds) ** 0.5


@pytest.mark.parametrize("kind", ["poisson", "trace"])
def test_both_kinds_of_arrivals_keep_the_mean_rate(kind: str) -> None:
    times = load.arrivals_of(kind, TRACE, 100.0, 10.0, seed=3)
    assert len(times) == pytest.approx(1000, rel=0.15)
    assert times[-1] == pytest.approx(10.0, rel=0.1)


def test_lengths_come_from_the_trace_within_the_models_limit() -> None:
    sizes = load.sizes_of(TRACE, MODEL, 30_000)
    assert len(sizes) == 30_000
    assert (min(sizes) >= 1, max(sizes) <= 64) == (True, True)
    assert len(set(sizes)) > 20


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    engine = FakeEngine(doubler("ragged", shape=("length",)))
    model: Any = engine.models["ragged"]

    async def go(url: str) -> Outcome:
        sender = Sender(url, most=1)
        model.hold()

        async def release_later() -> None:
            while sender.outcome.sent < 2:
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_later(0.3, model.release)

        # The only connection waits for an answer; the second request is due meanwhile.
        due_s = np.array([0.0, 0.05])
        requests = load.requests_of(MODEL, [4, 4], 30.0)
        try:
            outcome, _ = await asyncio.gather(sender.run(requests, due_s, 1.0, 30.0), release_later())
        finally:
            await sender.close()
        return outcome

    with running(create_app(engine)) as url:
        outcome = asyncio.run(go(url))
    assert (outcome.sent, len(outcome.ok_s), outcome.open) == (2, 2, 0)
    assert outcome.ok_s[0] >= 0.34
    assert outcome.ok_s[1] >= 0.29  # sent after the first was answered, and answered at once: the wait counts


def test_what_is_refused_expires_or_breaks_is_counted_apart() -> None:
    outcome = Outcome(2.0, sent=6)
    for status, seconds in ((200, 0.05), (200, 0.5), (429, 0.1), (504, 0.2), (0, 0.0)):
        outcome.note(status, seconds)
    found = outcome.summary(0.1)
    assert (found["offered_rps"], found["answered_rps"], found["goodput_rps"]) == (3.0, 1.0, 0.5)
    assert (found["refused"], found["expired"], found["failed"], found["unanswered"]) == (1, 1, 1, 1)


def test_a_client_that_waits_for_a_connection_has_not_kept_up() -> None:
    outcome = Outcome(1.0, sent=2, lags_s=[0.001, 0.001])
    outcome.note(200, 0.05, 0.001)
    outcome.note(429, 0.31, 0.3)
    found = outcome.summary(0.1)
    assert found["client_kept_up"] is False
    assert found["client_lag_p99_ms"] == pytest.approx(1.0)
    assert found["client_wait_p99_ms"] == pytest.approx(300, rel=0.02)
    assert found["refusal_p99_ms"] == pytest.approx(10.0)


def test_a_sweep_over_a_server_and_its_figure(tmp_path: Path) -> None:
    with running(create_app(FakeEngine(doubler("ragged", shape=("length",))))) as url:
        found = load.measure(url, "ragged", TRACE, [20.0, 40.0], seconds=0.5, slo_s=5.0)
        assert [row["arrivals"] for row in found["rows"]] == ["poisson", "poisson", "trace", "trace"]
        assert all(row["failed"] == row["unanswered"] == 0 for row in found["rows"])
        assert all(row["goodput_rps"] == row["answered_rps"] > 0 for row in found["rows"])
        draw_load(tmp_path / "load.png", found)
        assert (tmp_path / "load.png").stat().st_size > 5_000
        with pytest.raises(ExperimentError, match="--model"):
            load.described(url, "nobody")


def test_a_sweep_over_grpc_and_what_it_refuses() -> None:
    engine = FakeEngine(doubler("ragged", shape=("length",)))
    model: Any = engine.models["ragged"]
    with running(create_app(engine)) as url, running_grpc(lambda: create_grpc_server(engine)) as address:
        port = int(address.rsplit(":", 1)[1])
        found = load.measure(url, "ragged", TRACE, [40.0], seconds=0.5, slo_s=5.0, grpc_port=port)
        assert found["protocol"] == "grpc"
        assert all(row["failed"] == row["unanswered"] == 0 for row in found["rows"])
        assert all(row["goodput_rps"] == row["answered_rps"] > 0 for row in found["rows"])

        async def go() -> Outcome:
            sender = Sender(f"grpc://{address}")
            try:
                requests = load.requests_of(MODEL, [64], 5.0, "grpc")
                return await sender.run(requests, np.zeros(250), 1.0, 30.0)
            finally:
                await sender.close()

        model.error = Overloaded("a queue holds at most 1 row; got 2: retry")
        outcome = asyncio.run(go())
        assert (outcome.refused, outcome.open, outcome.failed) == (250, 0, 0)


def test_a_message_that_one_window_cannot_hold_is_no_call_of_this_client() -> None:
    with pytest.raises(ExperimentError, match="60,000 bytes"):
        infer_call(bytes(60_001), 1.0)


def test_a_server_that_only_fails_has_no_capacity() -> None:
    engine = FakeEngine(doubler("ragged", shape=("length",)))
    engine.cool(0)

    async def go(url: str) -> float:
        sender = Sender(url)
        try:
            return await saturated(sender, load.requests_of(MODEL, [4], 1.0), 2, 0.2)
        finally:
            await sender.close()

    with running(create_app(engine)) as url, pytest.raises(ExperimentError, match="refusals"):
        asyncio.run(go(url))


def test_a_server_is_named_by_its_url() -> None:
    with pytest.raises(ExperimentError, match="http://host:port"):
        Sender("localhost:8000")


def test_a_short_recording_is_repeated() -> None:
    times = load.arrivals_of("trace", TRACE, 10.0 * len(TRACE), 1.0, seed=3)
    assert len(times) == 10 * len(TRACE)
    assert (np.diff(times) >= 0).all()
    assert 0.9 <= times[-1] <= 1.0
