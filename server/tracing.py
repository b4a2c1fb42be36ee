"""Spans of OpenTelemetry for each call: queue, padding, device, answer, under one span of the request.

Nothing is instrumented: the device thread notes which batches a traced call took part in and when they ran,
and the spans are made of those times once the answer is out. What is not traced costs one check a place.

Source: OpenTelemetry's semantic conventions for HTTP and RPC spans; W3C Trace Context for the parent.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _version
from .context import TRACE, Trace
from .errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from .batching.batch import Batch

_log = logging.getLogger(__name__)
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a call that is over; seconds on the server's clock."""

    name: str
    begun_s: float
    ended_s: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Recorded(Trace):
    """The trace of a call whose spans are wanted; whoever does a part of the work notes it here."""

    stages: list[Stage] = field(default_factory=list)


class Tracing:
    """Makes the spans of calls.

    Args:
        provider: of a tracer; None makes one that exports as the `OTEL_*` variables say.
        now: seconds on the clock of the server that is traced.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(
        self, provider: "TracerProvider | None" = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = provider is None
        self._provider: Any = _provider() if provider is None else provider
        self._tracer = self._provider.get_tracer("servax", _version.__version__)
        self._now = now
        self._numbers = itertools.count(1)

    def begin(self, name: str, carrier: Mapping[str, str], attributes: Attributes) -> "CallSpan":
        """Start the span of a call; `end` it in the same task.

        Args:
            name: of the span.
            carrier: headers by lower-case name; `traceparent` and `tracestate` name the parent.
            attributes: known so far.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        context = span.get_span_context()
        ids = f"{context.trace_id:032x}", _parent_of(span), f"{context.span_id:016x}"
        trace = Recorded(*ids) if span.is_recording() else Trace(*ids)
        # The wall's time of a moment on the server's clock, taken once: the two drift apart.
        anchor_ns = time.time_ns() - round(self._now() * 1e9)
        return CallSpan(span, trace, TRACE.set(trace), lambda seconds: anchor_ns + round(seconds * 1e9), self)

    def landed(self, batch: "Batch", begun_s: float, seconds: float) -> None:
        """Note a batch in the traces of the calls that are in it; device thread, never raises."""
        try:
            mine: dict[int, list[Any]] = {}
            for row in batch.rows:
                if row.request.trace is not None:
                    mine.setdefault(id(row.request), []).append(row)
            if mine:
                self._note(batch, list(mine.values()), begun_s, begun_s + seconds)
        except Exception:  # it may cost a span, but not the loop
            _log.exception("a batch could not be traced")

    def _note(self, batch: "Batch", groups: list[list[Any]], begun_s: float, ended_s: float) -> None:
        record = batch.record(ended_s - begun_s)
        common: Attributes = {
            "servax.model": record.model,
            "servax.bucket": str(record.bucket),
            "servax.batch.id": next(self._numbers),
            "servax.batch.rows": record.rows,
            "servax.batch.reason": record.reason,
            "servax.batch.padding": round(1 - record.real / record.computed, 4),
        }
        padded_s = batch.launched_s + batch.pad_s
        begun_s = max(begun_s, padded_s)
        ended_s = max(begun_s, ended_s)
        for rows in groups:
            request, attributes = rows[0].request, {**common, "servax.rows": len(rows)}
            request.trace.stages.extend(
                [
                    Stage("queue", request.arrived_s, batch.launched_s, attributes),
                    Stage("pad", batch.launched_s, padded_s, attributes),
                    Stage("device", begun_s, ended_s, attributes),
                ]
            )

    def child(self, parent: "Span", name: str, begin_ns: int, end_ns: int, attributes: Attributes) -> None:
        """One span whose times are known."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(parent), attributes=attributes, start_time=begin_ns
        )
        span.end(max(begin_ns, end_ns))

    def close(self) -> None:
        """Export what is left, if the exporter is our own."""
        if self._own:
            self._provider.shutdown()


@dataclass(slots=True)
class CallSpan:
    """The open span of one call.

    Attributes:
        span: of OpenTelemetry.
        trace: its ids, and the stages noted so far.
    """

    span: "Span"
    trace: Trace
    _token: Any
    _wall_ns: Callable[[float], int]
    _tracing: Tracing

    def end(self, attributes: Attributes, error: str = "", first_s: float | None = None) -> None:
        """Make the spans below and end it; in the task that began it.

        Args:
            attributes: what became known.
            error: why the server failed; "" if it did not.
            first_s: when the answer began, on the server's clock; where stages were noted, it began with the
                end of the last.
        """
        from opentelemetry.trace import Status, StatusCode

        TRACE.reset(self._token)
        end_ns = time.time_ns()
        if isinstance(self.trace, Recorded):
            wall = self._wall_ns
            for one in self.trace.stages:
                self._tracing.child(self.span, one.name, wall(one.begun_s), wall(one.ended_s), one.attributes)
                first_s = one.ended_s
            if first_s is not None:
                self._tracing.child(self.span, "answer", wall(first_s), end_ns, {})
        self.span.set_attributes(attributes)
        if error:
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end(end_ns)


def recorded_trace() -> Recorded | None:
    """The trace of the call in hand, if its spans are wanted; what a dispatcher asks for each request."""
    trace = TRACE.get()
    return trace if isinstance(trace, Recorded) else None


def _parent_of(span: "Span") -> str:
    parent = getattr(span, "parent", None)
    return "" if parent is None else f"{parent.span_id:016x}"


def _provider(environ: Mapping[str, str] = os.environ) -> Any:
    """A provider that exports as OpenTelemetry's own variables say: OTLP over HTTP, or to the console."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"Traces need OpenTelemetry, got: {error}; pip install 'servax[otel]', or leave traces off."
        ) from error
    wanted = environ.get("OTEL_TRACES_EXPORTER", "otlp") or "otlp"
    if wanted not in ("otlp", "console", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is otlp, console or none, got {wanted!r}; correct it.")
    resource = {} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "servax"}
    provider = TracerProvider(resource=Resource.create(resource))
    if wanted != "none":
        exporter = OTLPSpanExporter() if wanted == "otlp" else ConsoleSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
