"""One trace, all schemes: waste on both halves, and latency and throughput on the second.

The comparison of `compare_schemes`, without its command line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bucketing import Bucket, Grid, Ladder, powers_of_two
from .contenders import PACKING_WINDOW, Contender, contenders, one_row_waste
from .cost_table import MAX_ELEMENTS, CostTable, LinearCost
from .packed import PackingBatcher
from .simulate import Simulated, SimulatedBatcher, grid_batcher, simulate
from .traces import Trace

Seconds = Callable[[Bucket], float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How one trace is run.

    Args:
        cost: Seconds of a bucket.
        source: Where the cost comes from, for the table.
        compile_s: Seconds to compile a bucket's program, measured or the nearest measured.
        batches: Batch sizes of the grid; one-row prefill has the batch 1 only.
        max_elements: Buckets above it are left out.
        load: Offered work without any padding, one row at a time, as a share of the device.
        requests: Most requests that are simulated.
        seed: Seed of arrivals for traces that have none.
    """

    cost: Seconds
    source: str
    compile_s: Seconds
    batches: Ladder
    max_elements: int | None
    load: float
    requests: int
    seed: int


def setting(trace: Trace, table: CostTable, *, load: float, requests: int, seed: int) -> Setting:
    """MiniLM's measured table for texts; the linear prior and one-row prefill for prompts."""
    if trace.limit <= max(bucket.sizes[1] for bucket in table.seconds):
        batches = powers_of_two().ladder(max(bucket.rows for bucket in table.seconds))
        return Setting(table, "measured", table.compile_s_of, batches, MAX_ELEMENTS, load, requests, seed)
    mean_s = table.mean_compile_s()
    return Setting(LinearCost(), "linear prior", lambda _: mean_s, Ladder((1,)), None, load, requests, seed)


@dataclass(frozen=True, slots=True)
class Runs:
    """Simulations of one scheme: at the arrival rate of all schemes, and with everything waiting at once."""

    offered: Simulated
    at_once: Simulated


def compare(trace: Trace, how: Setting) -> Iterator[tuple[Row, Contender, Runs | None]]:
    """Every scheme on one trace: two rows each, of which the one for the test half is simulated.

    Yields:
        The row, the contender, and its simulations where there are any.
    """
    seen, tested = trace.halves()
    offered = tested.part(0, how.requests)
    ideal_s = float(np.mean([how.cost(Bucket(("batch", "length"), (1, int(n)))) for n in offered.lengths]))
    offered = offered.at_rate(how.load / ideal_s, how.seed)
    for contender in contenders(seen):
        grid = _grid(contender, offered, how)
        common: Row = {
            "trace": trace.name,
            "scheme": contender.scheme,
            "name": contender.name,
            "limit": trace.limit,
            "compile_source": "measured" if how.source == "measured" else "mean of MiniLM's programs",
        }
        yield {**common, **_bill(contender, seen, how)}, contender, None
        row = {**common, **_bill(contender, tested, how), "split": "test"}
        runs = _simulated(contender, grid, offered, how) if contender.simulated else None
        if runs is not None:
            row |= {"cost_source": how.source, "requests": len(offered), **_facts(runs)}
        yield row, contender, runs


def _bill(contender: Contender, trace: Trace, how: Setting) -> Row:
    """What a half of the trace needs: programs, their compile time, and the padding."""
    grid = _grid(contender, trace, how)
    return {
        "split": "fit",
        "programs": len(grid.rungs("length")),
        "buckets": len(grid),
        "compile_s": sum(map(how.compile_s, grid)),
        "waste": one_row_waste(contender, trace),
    }


def _grid(contender: Contender, trace: Trace, how: Setting) -> Grid:
    # Nobody compiles every batch size of every length: without buckets, and packed, each row runs alone.
    batches, lengths = Ladder((1,)), contender.ladder
    if contender.kind == "ladder":
        batches = how.batches
    elif contender.kind == "exact":
        lengths = Ladder(tuple(np.unique(trace.lengths).tolist()))
    return Grid.product({"batch": batches, "length": lengths}, max_elements=how.max_elements)


def _batcher(contender: Contender, grid: Grid, how: Setting) -> SimulatedBatcher:
    if contender.kind == "packing":
        return PackingBatcher(contender.ladder, PACKING_WINDOW)
    return grid_batcher(grid, how.cost)


def _simulated(contender: Contender, grid: Grid, offered: Trace, how: Setting) -> Runs:
    on_path = how.compile_s if contender.kind == "exact" else None
    at_once = np.zeros(len(offered))
    arrivals = at_once if offered.arrivals_s is None else offered.arrivals_s
    return Runs(
        simulate(offered.lengths, arrivals, _batcher(contender, grid, how), how.cost, first_run_s=on_path),
        simulate(offered.lengths, at_once, _batcher(contender, grid, how), how.cost),
    )


def _facts(runs: Runs) -> Row:
    run = runs.offered
    p50, p95, p99 = run.percentiles_s()
    return {
        "offered_per_s": len(run.arrivals_s) / float(np.ptp(run.arrivals_s)),
        "throughput_per_s": run.requests_per_s,
        "tokens_per_s": run.elements_per_s,
        "capacity_per_s": runs.at_once.requests_per_s,
        "capacity_tokens_per_s": runs.at_once.elements_per_s,
        "utilisation": run.utilisation,
        "run_waste": run.waste,
        "mean_rows": len(run.arrivals_s) / len(run.launches),
        "p50_ms": p50 * 1e3,
        "p95_ms": p95 * 1e3,
        "p99_ms": p99 * 1e3,
    }
