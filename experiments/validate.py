"""Whether the simulation tells the truth: the same texts through a real server in this process.

Claim: from the cost table and the batcher's code alone, throughput is predicted within 15 %.

A machine is not equally fast at all times, so the table is scaled by one number, the *pace*: the median of
the seconds of the replay's batches over the table's. Beside that prediction stand one from the table as it
is, and one from the mean seconds of each bucket in the replay. A server that chooses other buckets than the
simulation does, because it believes in other costs, is exposed by the first two and hidden by the last.
Each row says what other processes took of the machine; a replay that they disturbed is tried again.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bucketing import Bucket, Grid, Ladder, fitted, parse_scheme, powers_of_two
from .cost_table import MAX_ELEMENTS, CostTable
from .errors import ExperimentError
from .minilm import minilm_servable, token_ids
from .simulate import Simulated, grid_batcher, simulate
from .traces import TEXT_LIMIT, load_texts, load_trace

TOLERANCE = 0.15
# Shares of the predicted capacity at which texts are sent; above 1 the queue never empties.
LOADS = (0.7, 2.0)
MAX_BATCH = 16
# Above this share of other processes a replay is tried again.
QUIET = 0.05
_TRIES = 3
_PATIENCE_S = 60


def validation_grids(seed: int) -> dict[str, Grid]:
    """The grids that are run for real: the usual powers of two, and a ladder fitted to half of the texts."""
    seen, _ = load_trace("texts", seed=seed).halves()
    ladders = {
        "powers_of_two:16": parse_scheme("powers_of_two:16").ladder(TEXT_LIMIT),
        "fitted:5": fitted(seen.lengths, 5).ladder(TEXT_LIMIT),
    }
    batches = powers_of_two().ladder(MAX_BATCH)
    return {name: _grid(batches, ladder) for name, ladder in ladders.items()}


def _grid(batches: Ladder, lengths: Ladder) -> Grid:
    return Grid.product({"batch": batches, "length": lengths}, max_elements=MAX_ELEMENTS)


def validate(table: CostTable, *, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """Replay texts against a real server per scheme, below and above its capacity.

    Args:
        table: Measured costs.
        seconds: About how long one replay lasts.
        seed: Which texts, and when they arrive.

    Yields:
        One row a scheme and load: predicted and measured throughput, waste and latencies.
    """
    _, tested = load_trace("texts", seed=seed).halves()
    texts = load_texts(seed=seed)
    ids = token_ids([text.text for text in texts[len(texts) // 2 :]])
    if [len(one) for one in ids] != tested.lengths.tolist():
        raise ExperimentError("The token counts of the packaged texts are those of the MiniLM tokenizer.")
    for name, grid in validation_grids(seed).items():
        at_once = _predicted(tested.lengths, np.zeros(len(tested)), grid, table)
        with _Live(grid, table) as live:
            for load in LOADS:
                rate = load * at_once.requests_per_s
                count = min(max(1, int(seconds * min(rate, at_once.requests_per_s))), len(ids))
                arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
                measured = live.replay(ids[:count], arrivals)
                paced, plain, own = (
                    _predicted(tested.lengths[:count], arrivals, grid, cost)
                    for cost in (partial(_scaled, table, measured["pace"]), table, live.recorded())
                )
                yield {
                    "scheme": name,
                    "load": load,
                    "requests": count,
                    "buckets": len(grid),
                    "compile_s": live.compile_s,
                    "unscaled_per_s": plain.requests_per_s,
                    "own_costs_per_s": own.requests_per_s,
                    "predicted_batches": len(paced.launches),
                    **_compared(paced, measured),
                }


def _scaled(cost: CostTable, pace: float, bucket: Bucket) -> float:
    return pace * cost(bucket)


def _predicted(
    lengths: NDArray[np.int64], arrivals: NDArray[np.float64], grid: Grid, cost: Callable[[Bucket], float]
) -> Simulated:
    return simulate(lengths, arrivals, grid_batcher(grid, cost), cost)


def _compared(predicted: Simulated, measured: Mapping[str, float]) -> dict[str, Any]:
    p50, p95, p99 = predicted.percentiles_s()
    ratio = measured["throughput_per_s"] / predicted.requests_per_s
    return {
        "predicted_per_s": predicted.requests_per_s,
        "measured_per_s": measured["throughput_per_s"],
        "ratio": ratio,
        "within": abs(ratio - 1) <= TOLERANCE,
        "measured_batches": measured["batches"],
        "pace": measured["pace"],
        "others_cpu": measured["others_cpu"],
        "predicted_waste": predicted.waste,
        "measured_waste": measured["waste"],
        **{f"predicted_{name}_ms": value * 1e3 for name, value in (("p50", p50), ("p95", p95), ("p99", p99))},
        **{f"measured_{name}_ms": measured[name] * 1e3 for name in ("p50", "p95", "p99")},
    }


class _Live:
    """A MiniLM server in this process, and an open-loop client for it."""

    def __init__(self, grid: Grid, cost: CostTable) -> None:
        from ..server import BatchRecord, Server

        self._cost = cost
        self._records: list[BatchRecord] = []
        self._server = Server(minilm_servable(grid), on_batch=self._records.append)
        self.compile_s = 0.0

    def __enter__(self) -> "_Live":
        self._server.__enter__()
        warm = self._server.reports["minilm"].warm
        self.compile_s = sum(bucket.facts.compile_s for bucket in warm)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def recorded(self) -> CostTable:
        """Mean seconds of the batches of the last replay."""
        seconds: dict[Bucket, list[float]] = {}
        for record in self._records:
            seconds.setdefault(record.bucket, []).append(record.seconds)
        return CostTable({bucket: sum(one) / len(one) for bucket, one in seconds.items()}, {}, {})

    def replay(self, ids: Sequence[NDArray[np.int32]], arrivals_s: NDArray[np.float64]) -> dict[str, float]:
        """Send each text at its time, whatever was answered; latencies count from the planned arrival."""
        for _ in range(_TRIES):
            busy_s, own_s = _machine_busy_s(), time.process_time()
            done = self._replay(ids, arrivals_s)
            others_s = max(0.0, _machine_busy_s() - busy_s - (time.process_time() - own_s))
            others = others_s / (float(done.max()) * (os.cpu_count() or 1))
            if others < QUIET:
                break
        p50, p95, p99 = np.percentile(done - arrivals_s, (50, 95, 99)).tolist()
        return {
            "throughput_per_s": len(ids) / float(done.max() - arrivals_s[0]),
            "waste": 1 - sum(one.real for one in self._records) / sum(one.computed for one in self._records),
            "batches": len(self._records),
            "pace": median(one.seconds / self._cost(one.bucket) for one in self._records),
            "others_cpu": others,
            "p50": p50,
            "p95": p95,
            "p99": p99,
        }

    def _replay(
        self, ids: Sequence[NDArray[np.int32]], arrivals_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Seconds from the start of the replay to each answer."""
        model = self._server.model()
        done = np.full(len(ids), np.nan)
        self._records.clear()
        answered = threading.Semaphore(0)
        begin = time.perf_counter()

        def finish(place: int, _: object) -> None:
            done[place] = time.perf_counter() - begin
            answered.release()

        for place, (one, at_s) in enumerate(zip(ids, arrivals_s.tolist(), strict=True)):
            early_s = at_s - (time.perf_counter() - begin)
            if early_s > 0:
                time.sleep(early_s)
            model.run_threaded([{"ids": one}]).add_done_callback(partial(finish, place))
        for _ in ids:
            if not answered.acquire(timeout=_PATIENCE_S):
                raise ExperimentError(f"Every text is answered within {_PATIENCE_S} s; some were not.")
        return done


def _machine_busy_s() -> float:
    """Processor seconds that all processes of the machine have used; 0 where the system does not say."""
    try:
        with open("/proc/stat") as lines:
            ticks = [int(word) for word in lines.readline().split()[1:9]]
    except OSError:
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
