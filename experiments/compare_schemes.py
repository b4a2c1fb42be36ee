"""Bucket schemes on public traces: padding waste, programs, compile time, throughput and latency.

Claim: out of sample (fitted on the first half of a trace, tested on the second), on the prompts of Azure's
conversation service and for one-row prefill, a fitted ladder of at most 13 programs wastes at most 11 %
and packing at most 6 %, where 8 powers of two waste about 30 %.

    python -m servax.experiments.compare_schemes --quick --json result.json --figures figures

Waste needs lengths alone. Latency and throughput are simulated with the server's own batcher: for texts
with MiniLM's measured cost table, for language-model prompts with a linear prior, since no such model runs
here. `--validate` runs a real MiniLM server and compares.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bucketing import Bucket
from .compare import Row, Runs, compare, setting
from .contenders import Contender
from .cost_table import LENGTHS, CostTable, cached, default_buckets
from .extra import require
from .reporting import machine, print_table, write_json
from .simulate import Simulated
from .traces import NAMES, Trace, load_trace

QUICK_TRACES = tuple(name for name in NAMES if name not in ("mooncake_fast25_synthetic", "embed_lengths"))
_QUICK_LENGTHS = (16, 32, 64, 128, 192, 256)
LADDER_TRACE = "azure_llm_2023_conv"
LATENCY_TRACES = (LADDER_TRACE, "mooncake_fast25_conversation", "texts")
_NOTE = (
    "waste: of each request padded alone to its rung; packing: with a queue that never runs dry. run: in the "
    "simulation, spare rows included. Answers/s and latency: at one arrival rate for all. capacity: all "
    "requests waiting from the start. exact compiles on the request path."
)
COLUMNS = {
    "name": "scheme",
    "programs": "programs|,d",
    "fit_waste": "waste fit|.1%",
    "waste": "test|.1%",
    "run_waste": "run|.1%",
    "compile_s": "compile s|,.0f",
    "throughput_per_s": "answers/s|,.1f",
    "capacity_per_s": "capacity|,.1f",
    "p50_ms": "p50 ms|,.0f",
    "p95_ms": "p95|,.0f",
    "p99_ms": "p99|,.0f",
}
_VALIDATION_NOTE = (
    "load: arrival rate / predicted capacity. pace: seconds of the replay's batches / table, by which the "
    "prediction is scaled; table: without that; own: from the mean seconds of each bucket in the replay. "
    "others: what other processes took of the machine. Latencies in ms."
)
VALIDATION_COLUMNS = {
    "scheme": "scheme",
    "load": "load|.1f",
    "predicted_per_s": "predicted/s|.0f",
    "measured_per_s": "measured/s|.0f",
    "ratio": "ratio|.2f",
    "predicted_batches": "batches pred.|d",
    "measured_batches": "meas.|d",
    "pace": "pace|.2f",
    "unscaled_per_s": "table/s|.0f",
    "own_costs_per_s": "own/s|.0f",
    "others_cpu": "others|.0%",
    "predicted_waste": "waste pred.|.1%",
    "measured_waste": "meas.|.1%",
    "predicted_p50_ms": "p50 pred.|.0f",
    "measured_p50_ms": "meas.|.0f",
    "predicted_p95_ms": "p95 pred.|.0f",
    "measured_p95_ms": "meas.|.0f",
}


class Comparison:
    """All rows, and what the figures need of the simulations."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.traces: dict[str, Trace] = {}
        self.contenders: dict[tuple[str, str], Contender] = {}
        self.runs: dict[tuple[str, str], Runs] = {}

    def add(self, trace: Trace, table: CostTable, **options: Any) -> None:
        """Compare all schemes on one more trace."""
        self.traces[trace.name] = trace
        for row, contender, runs in compare(trace, setting(trace, table, **options)):
            self.rows.append(row)
            self.contenders[trace.name, contender.name] = contender
            if runs is not None:
                self.runs[trace.name, contender.name] = runs

    def find(self, trace: str, name: str, split: str = "test") -> Row | None:
        """The row of one scheme."""
        wanted = trace, name, split
        rows = (row for row in self.rows if (row["trace"], row["name"], row["split"]) == wanted)
        return next(rows, None)

    def shown(self, trace: str) -> list[Row]:
        """The simulated rows of the test half, each with the waste on the fit half beside it."""
        rows = [row for row in self.rows if row["trace"] == trace and "p50_ms" in row]
        return [
            {**row, "fit_waste": (self.find(trace, row["name"], "fit") or {}).get("waste")} for row in rows
        ]

    def claims(self) -> list[dict[str, Any]]:
        """The script's claim, number by number; none if its trace was left out."""
        fits = [
            row["waste"]
            for row in self.rows
            if row["trace"] == LADDER_TRACE
            and row["split"] == "test"
            and row["scheme"] == "fitted"
            and row["programs"] <= 13
        ]
        doubling = self.find(LADDER_TRACE, "powers_of_two:128")
        packing = self.find(LADDER_TRACE, "packing:single")
        if not fits or doubling is None or packing is None:
            return []
        return [
            _claim("8 powers of two waste about 30 %", doubling["waste"], 0.27, 0.33),
            _claim("fitted, at most 13 programs, wastes at most 11 %", min(fits), 0.0, 0.11),
            _claim("packing wastes at most 6 %", packing["waste"], 0.0, 0.06),
        ]


def _claim(text: str, value: float, low: float, high: float) -> dict[str, Any]:
    return {"claim": text, "trace": LADDER_TRACE, "waste": value, "holds": low <= value <= high}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, and write what was asked for."""
    options = _options(arguments)
    began = time.perf_counter()
    table = cached(options.costs, buckets=_buckets(options.quick), runs=5 if options.quick else 9)
    costs_s = time.perf_counter() - began
    comparison = Comparison()
    names = options.traces or (QUICK_TRACES if options.quick else NAMES)
    requests = options.requests or (1000 if options.quick else 5000)
    for name in names:
        trace = load_trace(name, seed=options.seed)
        comparison.add(trace, table, load=options.load, requests=requests, seed=options.seed)
        source = comparison.shown(name)[0]["cost_source"]
        title = f"{name}, limit {trace.limit:,}; costs: {source}"
        print_table(title, COLUMNS, comparison.shown(name), _NOTE if name == names[-1] else None)
    validation = _validated(options, table)
    claims = comparison.claims()
    for one in claims:
        print(f"{'holds' if one['holds'] else 'FAILS'}: {one['claim']}: {one['waste']:.1%}")
    if options.figures is not None:
        _draw(comparison, options.figures)
    if options.json is not None:
        write_json(
            options.json,
            {
                "claims": claims,
                "machine": machine(),
                "settings": {"seed": options.seed, "load": options.load, "requests": requests},
                "seconds": {"costs": costs_s, "all": time.perf_counter() - began},
                "rows": comparison.rows,
                "validation": validation,
                "cost_table": table.to_dict(),
            },
        )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m servax.experiments.compare_schemes", description="Compare bucket schemes on traces."
    )
    parser.add_argument("--quick", action="store_true", help="fewer traces, requests and measured buckets")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    parser.add_argument("--costs", type=Path, help="cost table: read if it was made here, else written")
    parser.add_argument("--validate", action="store_true", help="also run a real MiniLM server and compare")
    parser.add_argument("--traces", nargs="+", choices=NAMES, metavar="TRACE", help=", ".join(NAMES))
    parser.add_argument("--requests", type=int, help="most requests simulated a trace (5000, quick 1000)")
    parser.add_argument("--load", type=float, default=0.5, help="unpadded work / device time (0.5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of shuffles and of Poisson arrivals (0)")
    options = parser.parse_args(arguments)
    if options.figures is not None:
        require("matplotlib")
    if not 0 < options.load < 100 or (options.requests is not None and options.requests < 10):
        parser.error("--load is above 0 and --requests at least 10")
    return options


def _buckets(quick: bool) -> tuple[Bucket, ...]:
    lengths = _QUICK_LENGTHS if quick else LENGTHS
    return tuple(bucket for bucket in default_buckets() if bucket["length"] in lengths)


def _validated(options: argparse.Namespace, table: CostTable) -> list[dict[str, Any]]:
    if not options.validate:
        return []
    from .validate import validate

    rows = list(validate(table, seconds=6.0, seed=options.seed))
    title = "simulated against a real MiniLM server in this process"
    print_table(title, VALIDATION_COLUMNS, rows, _VALIDATION_NOTE)
    return rows


def _draw(comparison: Comparison, folder: Path) -> None:
    from .figures import draw_ladders, draw_latencies, draw_use, draw_waste

    names = comparison.traces
    draw_waste(folder / "waste.png", comparison.rows)
    if LADDER_TRACE in names:
        chosen = "fitted:13", "powers_of_two:128"
        ladders = [
            (name, comparison.contenders[LADDER_TRACE, name].ladder, _waste(comparison, name))
            for name in chosen
        ]
        draw_ladders(folder / "ladder.png", names[LADDER_TRACE].halves()[1], ladders)
    traces = [name for name in LATENCY_TRACES if name in names]
    if traces:
        draw_latencies(folder / "latency.png", _chosen_runs(comparison.runs, traces))
    if "texts" in names:
        runs = {name: comparison.runs["texts", name] for name in ("powers_of_two:16", "fitted:8")}
        panels = {f"{name}, half load": one.offered for name, one in runs.items()}
        panels |= {f"{name}, full queue": one.at_once for name, one in runs.items()}
        draw_use(folder / "use.png", "texts", panels)


def _waste(comparison: Comparison, name: str) -> float:
    row = comparison.find(LADDER_TRACE, name)
    return float(row["waste"]) if row else 0.0


def _chosen_runs(
    runs: Mapping[tuple[str, str], Runs], traces: Sequence[str]
) -> dict[tuple[str, str], Simulated]:
    """The schemes worth a line, in one order on all traces."""
    left_out = ("linear", "bounded_waste", "geometric", "packing:single")
    return {
        key: one.offered for key, one in runs.items() if key[0] in traces and not key[1].startswith(left_out)
    }


if __name__ == "__main__":
    main()
