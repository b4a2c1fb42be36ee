"""Claim: when the lengths that arrive change, a running server fits its sizes anew, waste falls, and no
request sees a compile or a pause.

MiniLM under a closed loop of a few clients. First the lengths fit the ladder, then they sit just above a
rung; then the server re-fits while the load goes on. For each phase: padding waste, latency percentiles,
answers a second, and what was traced or compiled on the request path.

    python -m servax.experiments.live_refit --json live_refit.json
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..bucketing import Grid
from ..jit_cache import REQUEST, compile_log
from ..server import BatchRecord, RefitPolicy, Server
from .errors import ExperimentError
from .minilm import minilm_servable
from .reporting import machine, print_table, write_json

RUNGS = (16, 32, 64, 128, 256)
ROWS = (1, 2, 4)
_PHASES = ("fits", "drifted", "re-fitting", "re-fitted")


@dataclass
class Phase:
    """What was seen in one phase; filled by the clients and the device thread."""

    latencies_s: list[float] = field(default_factory=list)
    real: int = 0
    computed: int = 0
    seconds: float = 0.0


class Load:
    """Clients that send one text after another until stopped.

    Args:
        server: what is driven.
        clients: how many at a time.
        seed: of the lengths.
    """

    def __init__(self, server: Server, clients: int, seed: int) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(np.random.default_rng((seed, n)),), daemon=True)
            for n in range(clients)
        ]
        self.lengths: tuple[int, int] = (50, 64)
        self.phase = Phase()
        self.failures: list[Exception] = []
        for thread in self._threads:
            thread.start()

    def _run(self, rng: np.random.Generator) -> None:
        while not self._stop.is_set():
            low, high = self.lengths
            ids = rng.integers(1000, 20_000, rng.integers(low, high + 1), dtype=np.int32)
            phase, begin = self.phase, time.perf_counter()
            try:
                self._server(ids=ids)
            except Exception as error:  # told when the load ends
                self.failures.append(error)
                return
            phase.latencies_s.append(time.perf_counter() - begin)

    def count(self, record: BatchRecord) -> None:
        """A batch ran."""
        self.phase.real += record.real
        self.phase.computed += record.computed

    def during(self, action: Callable[[], Any]) -> Phase:
        """What was seen while an action ran."""
        self.phase, begin = Phase(), time.perf_counter()
        action()
        seen = self.phase
        seen.seconds = time.perf_counter() - begin
        return seen

    def close(self) -> None:
        """Stop the clients; raises what went wrong for one of them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        if self.failures:
            raise ExperimentError(f"Every request must be answered; got {self.failures[0]}")


def measure(clients: int, phase_s: float, seed: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each phase."""
    policy = RefitPolicy(
        interval_s=3600, min_rows=50, raise_at=0.3, clear_at=0.2, hold_s=0, half_life_s=phase_s
    )
    grid = Grid.explicit(("batch", "length"), [(rows, length) for rows in ROWS for length in RUNGS])
    counters: list[Load] = []

    def count(record: BatchRecord) -> None:
        for load in counters:
            load.count(record)

    with Server(minilm_servable(grid), refit=policy, seal=True, on_batch=count) as server:
        load = Load(server, clients, seed)
        counters.append(load)
        refit = server.refitters["minilm"].look
        rest = threading.Event()
        phases = [load.during(lambda: rest.wait(phase_s))]
        load.lengths = (66, 80)
        phases.append(load.during(lambda: rest.wait(2 * phase_s)))
        took: list[bool] = []
        phases.append(load.during(lambda: took.append(refit())))
        phases.append(load.during(lambda: rest.wait(phase_s)))
        load.close()
        if not took[0]:
            raise ExperimentError("The server was to re-fit and did not; allow more seconds for a phase.")
        on_path = compile_log().traces[REQUEST] + compile_log().compiles[REQUEST]
    return [_row(name, phase, on_path) for name, phase in zip(_PHASES, phases, strict=True)]


def _row(name: str, phase: Phase, on_path: int) -> dict[str, Any]:
    p50, p99, worst = np.percentile(phase.latencies_s, [50, 99, 100]) * 1e3
    return {
        "phase": name,
        "seconds": phase.seconds,
        "answers_per_s": len(phase.latencies_s) / phase.seconds,
        "waste": 1 - phase.real / phase.computed,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(worst),
        "compiles_on_path": on_path,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    clients: Annotated[int, typer.Option(min=1)] = 4,
    phase_s: Annotated[float, typer.Option(min=0.5, help="Seconds of a phase.")] = 8.0,
    seed: int = 0,
) -> None:
    """Change the lengths under load and re-fit."""
    rows = measure(clients, phase_s, seed)
    columns = {
        "phase": "phase",
        "seconds": "seconds|.1f",
        "answers_per_s": "answers/s|.1f",
        "waste": "waste|.1%",
        "p50_ms": "p50 ms|.1f",
        "p99_ms": "p99 ms|.1f",
        "max_ms": "max ms|.1f",
        "compiles_on_path": "compiles on path|d",
    }
    print_table("A running server re-fits its sizes", columns, rows)
    if json_file is not None:
        write_json(json_file, {"rows": rows, "machine": machine()})


if __name__ == "__main__":
    typer.run(main)
