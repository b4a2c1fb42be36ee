"""Spans of calls, read back with the SDK's exporter into memory: their tree, their times, what they say."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import jax.numpy as jnp
import numpy as np
import pytest
import servax
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from servax.server.context import TRACE
from servax.server.errors import ConfigError
from servax.server.generation.output import Delta, Usage
from servax.server.http.asgi import create_app
from servax.server.http.traced import route_of, traced_text, traced_whole
from servax.server.logs import JsonFormatter
from servax.server.rpc.service import create_grpc_server
from servax.server.rpc.testing import infer_request, running_grpc
from servax.server.tracing import Recorded, Tracing, recorded_trace
from servax.server.tracing import _provider as own_provider

TRACE_ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}


def double(params: Any, *, x: Any) -> Any:
    return {"y": x * params}


@pytest.fixture(scope="module")
def traced() -> Iterator[Any]:
    exporter = InMemorySpanExporter()
    # Begins no trace of its own: what comes without a sampled parent is not recorded.
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.0)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    servable = servax.Servable(
        double,
        jnp.float32(2),
        inputs={"x": "float32[length]"},
        limits={"length": 8, "batch": 2},
        scheme=[8],
        name="tiny",
    )
    with servax.Server(servable, tracing=tracing) as server:
        app = create_app(server, tracing=tracing)
        yield SimpleNamespace(exporter=exporter, server=server, app=app, tracing=tracing)
    provider.shutdown()


@pytest.fixture
def ask(traced: Any) -> Any:
    traced.exporter.clear()

    def send(path: str, rows: int = 1, **headers: str) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=traced.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                x = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": [1.0] * (3 * rows)}
                return await client.post(path, json={"inputs": [x]}, headers=headers)

        return asyncio.run(go())

    return send


def by_name(traced: Any) -> dict[str, Any]:
    return {span.name: span for span in traced.exporter.get_finished_spans()}


def test_a_request_has_its_stages_under_one_span_of_the_callers_trace(traced: Any, ask: Any) -> None:
    assert ask("/v2/models/tiny/infer", **SAMPLED, **{"x-request-id": "mine"}).status_code == 200
    spans = by_name(traced)
    root = spans.pop("POST /v2/models/{name}/infer")
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.kind is SpanKind.SERVER
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["servax.request_id"] == "mine"
    assert set(spans) == {"queue", "pad", "device", "answer"}
    assert all(span.parent.span_id == root.context.span_id for span in spans.values())
    queue, pad, device, answer = (spans[name] for name in ("queue", "pad", "device", "answer"))
    assert device.attributes["servax.bucket"] in {str(one) for one in traced.server.model().grid}
    assert device.attributes["servax.model"] == "tiny"
    assert device.attributes["servax.batch.rows"] == device.attributes["servax.rows"] == 1
    assert device.attributes["servax.batch.padding"] == pytest.approx(1 - 3 / 8)
    # One after the other, and none outside of the request.
    edges = [root.start_time, queue.start_time, queue.end_time, pad.end_time, device.end_time]
    edges += [answer.start_time, answer.end_time, root.end_time]
    tolerance_ns = 1_000_000  # two clocks, read one after the other
    assert all(later >= earlier - tolerance_ns for earlier, later in itertools.pairwise(edges))
    assert pad.start_time == queue.end_time
    assert device.start_time >= pad.end_time - tolerance_ns


def test_every_batch_of_a_split_request_is_there(traced: Any, ask: Any) -> None:
    assert ask("/v2/models/tiny/infer", rows=5, **SAMPLED).status_code == 200
    spans = traced.exporter.get_finished_spans()
    devices = [span for span in spans if span.name == "device"]
    assert sum(span.attributes["servax.rows"] for span in devices) == 5
    assert len({span.attributes["servax.batch.id"] for span in devices}) == len(devices) > 1
    assert sum(span.name == "answer" for span in spans) == 1


def test_calls_of_one_batch_share_its_id(traced: Any, ask: Any) -> None:
    async def go() -> None:
        for answer in asyncio.as_completed([one(), one(), one(), one()]):
            await answer

    async def one() -> None:
        call = traced.tracing.begin("call", SAMPLED, {})
        await traced.server.submit(x=np.ones(3, np.float32))
        call.end({})

    asyncio.run(go())
    devices = [span for span in traced.exporter.get_finished_spans() if span.name == "device"]
    assert len(devices) == 4
    for span in devices:
        mates = [
            one for one in devices if one.attributes["servax.batch.id"] == span.attributes["servax.batch.id"]
        ]
        assert len(mates) == span.attributes["servax.batch.rows"]


@pytest.mark.parametrize(
    "headers", [{}, {"traceparent": f"00-{TRACE_ID}-{PARENT}-00"}, {"traceparent": "junk"}]
)
def test_what_is_not_sampled_leaves_no_span(traced: Any, ask: Any, headers: dict[str, str]) -> None:
    assert ask("/v2/models/tiny/infer", **headers).status_code == 200
    assert by_name(traced) == {}


def test_errors_are_marked_if_they_are_the_servers(traced: Any, ask: Any) -> None:
    assert ask("/v2/models/none/infer", **SAMPLED).status_code == 404
    (root,) = (span for span in traced.exporter.get_finished_spans() if span.name.startswith("POST"))
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes["http.response.status_code"] == 404


def test_logs_of_a_traced_call_carry_the_ids_of_its_span(traced: Any, ask: Any) -> None:
    lines = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    log = logging.getLogger("servax.access")
    keep, level = Keep(), log.level
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    try:
        ask("/v2/models/tiny/infer", **SAMPLED)
    finally:
        log.removeHandler(keep)
        log.setLevel(level)
    root = by_name(traced)["POST /v2/models/{name}/infer"]
    assert f'"span_id": "{root.context.span_id:016x}"' in lines[0]
    assert f'"parent_id": "{PARENT}"' in lines[0]


def test_grpc_calls_have_the_same_spans(traced: Any) -> None:
    x = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": np.ones(3, np.float32).tobytes()}
    options: Any = {"metadata": list(SAMPLED.items()), "timeout": 30}
    traced.exporter.clear()
    with running_grpc(lambda: create_grpc_server(traced.server, tracing=traced.tracing)) as address:
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call(infer_request("tiny", [x]).SerializeToString(), **options)
            with pytest.raises(grpc.RpcError):
                call(infer_request("none", [x]).SerializeToString(), **options)
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", **options)
    spans = traced.exporter.get_finished_spans()
    good, bad = (span for span in spans if span.kind is SpanKind.SERVER)
    assert good.name == "inference.GRPCInferenceService/ModelInfer"
    assert f"{good.parent.span_id:016x}" == PARENT
    assert good.attributes["rpc.grpc.status_code"] == 0
    assert good.status.status_code is StatusCode.UNSET
    assert bad.attributes["rpc.grpc.status_code"] == 5
    assert bad.status.status_code is StatusCode.UNSET
    below = {span.name for span in spans if span.parent.span_id == good.context.span_id}
    assert below == {"queue", "pad", "device", "answer"}


def test_texts_have_a_stage_that_tells_of_their_tokens() -> None:
    ended = []

    async def deltas() -> AsyncIterator[Delta]:
        try:
            yield Delta((7,), "a")
            yield Delta((8, 9), "b", (), "stop", None, Usage(4, 3, 2))
        finally:
            ended.append(True)

    async def whole() -> Delta:
        return Delta((7, 8), "ab", (), "stop", None, Usage(4, 2, 1))

    async def go(trace: Recorded) -> None:
        assert [one.text async for one in traced_text(trace, "tiny", 4, deltas())] == ["a", "b"]
        left = traced_text(trace, "tiny", 4, deltas())
        assert (await anext(left)).text == "a"
        await left.aclose()  # type: ignore[attr-defined]
        assert (await traced_whole(trace, "tiny", 4, whole())).text == "ab"

    trace = Recorded("1" * 32, "")
    asyncio.run(go(trace))
    assert ended == [True, True]
    told = [(one.name, one.attributes["gen_ai.usage.output_tokens"]) for one in trace.stages]
    assert told == [("generate", 3), ("generate", 1), ("generate", 2)]
    assert [one.attributes["servax.cached_tokens"] for one in trace.stages] == [2, 0, 1]
    assert [one.attributes.get("servax.first_token_s") is None for one in trace.stages] == [
        False,
        False,
        True,
    ]


def test_probes_have_no_spans(traced: Any) -> None:
    async def go() -> None:
        transport = httpx.ASGITransport(app=traced.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            await client.get("/v2/health/live", headers=SAMPLED)

    traced.exporter.clear()
    asyncio.run(go())
    assert by_name(traced) == {}


def test_nothing_is_left_in_the_context(traced: Any, ask: Any) -> None:
    ask("/v2/models/tiny/infer", **SAMPLED)
    assert TRACE.get() is None
    assert recorded_trace() is None


def test_a_server_that_traces_nothing_asks_nobody() -> None:
    servable = servax.Servable(
        double, jnp.float32(2), inputs={"x": "float32[length]"}, limits={"length": 8, "batch": 1}, scheme=[8]
    )
    server = servax.Server(servable)
    assert server._dispatcher.trace_of_call is None
    assert server._device.on_landed is None
    server.close()


def test_a_broken_batch_record_costs_a_span_and_not_the_loop(traced: Any, caplog: Any) -> None:
    trace = SimpleNamespace(landed=[])
    row = SimpleNamespace(request=SimpleNamespace(trace=trace))
    traced.tracing.landed(SimpleNamespace(rows=[row]), 0.0, 0.0)
    assert "could not be traced" in caplog.text


def test_the_variables_choose_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp, console or none"):
        own_provider({"OTEL_TRACES_EXPORTER": "jaeger"})
    provider = own_provider({"OTEL_TRACES_EXPORTER": "none"})
    assert provider.resource.attributes["service.name"] == "servax"
    provider.shutdown()
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"servax\[otel\]"):
        Tracing()


def test_span_names_have_no_values() -> None:
    assert route_of("/v2/models/tiny/infer", {"name": "tiny"}) == "/v2/models/{name}/infer"
    assert route_of("/v1/embeddings", {}) == "/v1/embeddings"
