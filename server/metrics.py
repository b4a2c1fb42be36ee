"""What the server counts, as Prometheus metrics in a registry of its own."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from .batch_metrics import LATENCY_S, BatchMetrics
from .events import Events
from .recent import Recent

if TYPE_CHECKING:
    from .batching.batch import BatchRecord
    from .batching.faults import FaultRecord
    from .generation.engine import StepRecord
    from .hosting.refit import Refitter

_COMPILE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Ready:
    """A gauge for each model that is known when the metrics are read."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The samples."""
        found = GaugeMetricFamily("servax_model_ready", "1 while the model can answer.", labels=["model"])
        for name, ready in self._metrics.ready_of().items():
            found.add_metric([name], float(ready))
        yield found


class _Refits:
    """Re-fits of each model that has them, counted by who does them."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The samples."""
        found = CounterMetricFamily(
            "servax_refits",
            "Grids that were fitted anew to traffic: done; or failed, then the old one stays.",
            labels=["model", "outcome"],
        )
        for name, one in self._metrics.refitters.items():
            found.add_metric([name, "done"], one.swaps)
            found.add_metric([name, "failed"], one.failures)
        yield found


class Metrics:
    """Counters, histograms and gauges of one server.

    The engine calls `batch_record`, `compile` and `watch_rows`; transports call `reply`, `cut` and `shed`.
    Nothing here touches the process-wide default registry, so two servers in one process do not mix.

    Attributes:
        recent: the same counts for the live page.
        events: what happened to programs.
        ready_of: asked for the models and whether each can answer, whenever the metrics are read.
        refitters: of each model whose grid is fitted to traffic; their counts are read likewise.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.recent, self.events = Recent(), Events()
        self._requests = Counter(
            "servax_requests",
            "Requests by what the client got: outcome is ok, error or cancelled.",
            ["model", "route", "outcome", "reason"],
            registry=registry,
        )
        self._latency = Histogram(
            "servax_request_seconds",
            "Seconds from the first byte handed to the server to the encoded answer.",
            ["model", "route"],
            registry=registry,
            buckets=LATENCY_S,
        )
        self._shed = Counter(
            "servax_shed",
            "Requests refused for want of room: rows, elements or bytes of the queue, client (its share), "
            "deadline (the answer would come too late), displaced (by a more urgent one), lag (of the event "
            "loop), memory.",
            ["model", "cause"],
            registry=registry,
        )
        self._truncated = Counter(
            "servax_truncated_inputs",
            "Inputs that were cut because the caller asked.",
            ["model"],
            registry=registry,
        )
        self._batches = BatchMetrics(registry)
        self._faults = Counter(
            "servax_device_faults",
            "Faults of the device by kind (memory, transient) and what was done: retried, halved, blamed (on "
            "the rows), failed, opened (requests are refused), trial, gone, closed (it works again).",
            ["model", "kind", "action"],
            registry=registry,
        )
        self._down = Gauge(
            "servax_device_down", "Devices that are left alone since they failed.", registry=registry
        )
        self._compiles = Counter(
            "servax_compiles",
            "Programs compiled by XLA; phase `request` must stay 0.",
            ["phase"],
            registry=registry,
        )
        self._loads = Counter(
            "servax_program_loads",
            "Programs loaded instead of compiled.",
            ["phase", "source"],
            registry=registry,
        )
        self._compile_seconds = Histogram(
            "servax_program_seconds",
            "Seconds until a program was ready.",
            ["phase", "source"],
            registry=registry,
            buckets=_COMPILE_S,
        )
        self._rows = Gauge("servax_rows", "Rows waiting or running.", ["model", "state"], registry=registry)
        # Children by their labels: a look-up costs as much as the counting.
        self._replies: dict[tuple[str, str, str, str], tuple[Counter, Histogram]] = {}
        self._first_event = Histogram(
            "servax_first_event_seconds",
            "Seconds from a request to the first event of its stream: with text, to the first token.",
            ["model", "route"],
            registry=registry,
            buckets=LATENCY_S,
        )
        self._pages = Gauge(
            "servax_free_pages", "Pages of the KV pool that texts can take.", ["model"], registry=registry
        )
        self._drafted = Counter(
            "servax_draft_tokens", "Tokens guessed ahead and checked.", ["model"], registry=registry
        )
        self._accepted = Counter(
            "servax_accepted_draft_tokens",
            "Of those, the ones that were right.",
            ["model"],
            registry=registry,
        )
        self.ready_of: Callable[[], Mapping[str, bool]] = dict
        self.refitters: Mapping[str, Refitter] = {}
        registry.register(_Ready(self))
        registry.register(_Refits(self))
        for phase in ("warmup", "request"):
            self._compiles.labels(phase)

    def reply(self, model: str, route: str, outcome: str, reason: str, seconds: float) -> None:
        """Counts one request, once, by what its client got.

        Args:
            model: the served model's name, or "" if none was found (never a name that a client made up).
            route: the route's label.
            outcome: `ok`, `error` or `cancelled`.
            reason: the error's reason, or "".
            seconds: from arrival to answer.
        """
        key = (model, route, outcome, reason)
        found = self._replies.get(key)
        if found is None:
            found = self._requests.labels(*key), self._latency.labels(model, route)
            self._replies[key] = found
        requests, latency = found
        requests.inc()
        latency.observe(seconds)
        self.recent.reply(time.monotonic(), seconds, good=outcome == "ok")

    def first_event(self, model: str, route: str, seconds: float) -> None:
        """Counts one stream that begins: seconds from the request's arrival to its first event."""
        self._first_event.labels(model, route).observe(seconds)

    def shed(self, model: str, cause: str) -> None:
        """Counts one request that was refused for want of room, by what ran out."""
        self._shed.labels(model, cause).inc()

    def unread(self, count: int) -> None:
        """Counts requests that were refused unread, since the event loop was behind."""
        self._requests.labels("", "unread", "error", "overloaded").inc(count)
        self._shed.labels("", "lag").inc(count)
        self.recent.reply(time.monotonic(), 0.0, good=False, count=count)

    def cut(self, model: str, inputs: int) -> None:
        """Counts inputs that were cut at the caller's wish."""
        if inputs:
            self._truncated.labels(model).inc(inputs)

    def batch(
        self, model: str, bucket: str, rows: int, real: int, computed: int, seconds: float, reason: str
    ) -> None:
        """Counts one batch.

        Args:
            model: the model's name.
            bucket: the bucket, such as `batch=4,length=32`.
            rows: real rows in it.
            real: real elements (tokens) in it.
            computed: elements computed: the bucket's size.
            seconds: on the device.
            reason: why it was launched: full, window, deadline, idle, or step of a language model.
        """
        self._batches.count(model, bucket, rows, real, computed, seconds, reason)

    def batch_record(self, record: "BatchRecord") -> None:
        """Counts one batch of the engine and its rows' time in the queue; give it to `Server(on_batch=)`."""
        bucket = str(record.bucket)
        self.batch(
            record.model,
            bucket,
            record.rows,
            record.real,
            record.computed,
            record.seconds,
            record.reason,
        )
        self._batches.queued(record.model, record.queued_s)
        if record.cold:
            self._batches.cold(record.model, bucket)
        self.recent.batch(
            time.monotonic(),
            record.model,
            bucket,
            rows=record.rows,
            real=record.real,
            computed=record.computed,
            seconds=record.seconds,
            cold=record.cold,
            reason=record.reason,
        )

    def step_record(self, model: str, record: "StepRecord") -> None:
        """Counts one launch of a language model; give it, with a name, to `GenerationServer(on_step=)`."""
        mixed, rows = record.kind == "mixed", record.rows
        size = f"+{record.computed - rows}" if mixed else f"x{record.computed // rows}"
        program = f"{record.kind} {rows}{size}"
        self.batch(model, program, record.real, record.tokens, record.computed, record.seconds, reason="step")
        if record.drafted:
            self._drafted.labels(model).inc(record.drafted)
            self._accepted.labels(model).inc(record.accepted)
        self.recent.batch(
            time.monotonic(),
            model,
            program,
            rows=record.real,
            real=record.tokens,
            computed=record.computed,
            seconds=record.seconds,
            cold=False,
        )

    def watch_pages(self, model: str, free: Callable[[], float]) -> None:
        """Reads the number of pages that texts can take whenever the metrics are read."""
        self._pages.labels(model).set_function(free)

    def fault_record(self, record: "FaultRecord") -> None:
        """Counts one fault of the device; give it to `Server(on_fault=)`."""
        self._faults.labels(record.model, record.kind, record.action).inc()
        if record.action in ("opened", "closed"):
            self._down.inc(1 if record.action == "opened" else -1)

    def compile(self, phase: str, seconds: float, source: str) -> None:
        """Counts one program that became ready.

        Args:
            phase: `warmup`, `background` or `request`.
            seconds: until it was ready.
            source: `compiled`, or where it was loaded from, such as `store`.
        """
        if source == "compiled":
            self._compiles.labels(phase).inc()
        else:
            self._loads.labels(phase, source).inc()
        self._compile_seconds.labels(phase, source).observe(seconds)

    def watch_rows(self, model: str, waiting: Callable[[], float], running: Callable[[], float]) -> None:
        """Reads the numbers of waiting and running rows whenever the metrics are read."""
        self._rows.labels(model, "waiting").set_function(waiting)
        self._rows.labels(model, "running").set_function(running)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample's value, 0.0 if it does not exist yet; for tests and status pages."""
        return self.registry.get_sample_value(name, labels) or 0.0
