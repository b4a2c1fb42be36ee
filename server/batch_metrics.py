"""Counters of batches, by model and bucket; part of `Metrics`."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Borders of histograms of seconds that somebody waits for."""


class BatchMetrics:
    """What batches did, and how long their rows waited.

    Args:
        registry: where they are listed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["model", "bucket"]
        self._batches = Counter(
            "servax_batches",
            "Batches run, by why they were launched.",
            [*labels, "reason"],
            registry=registry,
        )
        self._batch_rows = Counter("servax_batch_rows", "Real rows in batches.", labels, registry=registry)
        self._real = Counter("servax_batch_real", "Real elements in batches.", labels, registry=registry)
        self._computed = Counter(
            "servax_batch_computed",
            "Elements computed in batches, padding included.",
            labels,
            registry=registry,
        )
        self._batch_seconds = Histogram(
            "servax_batch_seconds",
            "Seconds of one batch on the device.",
            labels,
            registry=registry,
            buckets=LATENCY_S,
        )
        self._wasted = Counter(
            "servax_batch_wasted_seconds",
            "Device seconds of padding at most: seconds x (1 - real / computed). Kernels may leave it out.",
            labels,
            registry=registry,
        )
        self._cold = Counter(
            "servax_cold_hits",
            "Batches that ran in a larger bucket since the right one was not warm.",
            labels,
            registry=registry,
        )
        self._queue = Histogram(
            "servax_queue_seconds",
            "Seconds that a row waited for its launch.",
            ["model"],
            registry=registry,
            buckets=LATENCY_S,
        )
        # Children by their labels: a look-up costs as much as the counting.
        self._of_bucket: dict[tuple[str, str], tuple[list[Counter], Histogram]] = {}

    def count(
        self, model: str, bucket: str, rows: int, real: int, computed: int, seconds: float, reason: str
    ) -> None:
        """Count one batch; see `Metrics.batch`."""
        found = self._of_bucket.get((model, bucket))
        if found is None:
            counters = (self._batch_rows, self._real, self._computed, self._wasted)
            found = [one.labels(model, bucket) for one in counters], self._batch_seconds.labels(model, bucket)
            self._of_bucket[model, bucket] = found
        self._batches.labels(model, bucket, reason).inc()
        for counter, amount in zip(
            found[0], (rows, real, computed, seconds * (1 - real / computed)), strict=True
        ):
            counter.inc(amount)
        found[1].observe(seconds)

    def queued(self, model: str, seconds: Iterable[float]) -> None:
        """Count how long each row of a batch waited for its launch."""
        queue = self._queue.labels(model)
        for one in seconds:
            queue.observe(one)

    def cold(self, model: str, bucket: str) -> None:
        """Count a batch that ran in a larger bucket than the right one."""
        self._cold.labels(model, bucket).inc()
