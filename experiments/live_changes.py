"""Claim: at 50 requests a second a server hardly slows while it changes: the median stays within 1.2 times
its quiet value while four programs compile in the background (case C9) and while a new version of the model
takes the old one's place (case W7), where the 99th percentile stays within 1.5 times too. No request fails.

MiniLM on short texts, sent by the clock whatever was answered before; a latency counts from the planned time.
Quiet phases lie before, between and after the changes, and each change is compared with the two beside it.
The version has the shapes of the old one, as new weights have, so it takes over its programs.

    python -m servax.experiments.live_changes --json live_changes.json
"""

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..bucketing import Bucket, Grid
from ..jit_cache import REQUEST, compile_log
from ..jit_cache.store import Store
from ..server import Server
from .errors import ExperimentError
from .minilm import minilm_servable
from .reporting import machine, print_table, write_json

AXES = ("batch", "length")
RUNGS = (16, 32)
ROWS = (1, 2, 4)
NEW = (72, 88, 104, 120)
_PATIENCE_S = 60.0
_PHASES = ("quiet", "four programs compile", "quiet", "version swap", "quiet")


class Load:
    """Sends one text after another at a fixed rate.

    Args:
        server: what is driven.
        rate: requests a second.
        seed: of the lengths and ids.
    """

    def __init__(self, server: Server, rate: float, seed: int) -> None:
        self._server, self._rate = server, rate
        self._rng = np.random.default_rng(seed)
        self._phase: list[float] = []
        self._left = threading.Semaphore(0)
        self._stop = threading.Event()
        self.sent = 0
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin_s, model = time.perf_counter(), self._server.model()
        while not self._stop.is_set():
            at_s = begin_s + self.sent / self._rate
            self._stop.wait(max(0.0, at_s - time.perf_counter()))
            length = int(self._rng.integers(8, RUNGS[-1] + 1))
            ids = self._rng.integers(1000, 20_000, length, dtype=np.int32)
            self.sent += 1
            self._send(model.run_threaded([{"ids": ids}]), at_s, self._phase)

    def _send(self, answer: "Future[Any]", at_s: float, phase: list[float]) -> None:
        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if error is not None:
                self.failures.append(error)
            phase.append(time.perf_counter() - at_s)
            self._left.release()

        answer.add_done_callback(settle)

    def during(self, action: Callable[[], object], least_s: float) -> list[float]:
        """Latencies of the requests that were sent while an action ran, and for some seconds at least."""
        begin_s, self._phase = time.perf_counter(), []
        phase = self._phase
        action()
        self._stop.wait(max(0.0, least_s - (time.perf_counter() - begin_s)))
        return phase

    def close(self) -> None:
        """Stop sending and wait for every answer.

        Raises:
            ExperimentError: if one failed or did not come.
        """
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        for _ in range(self.sent):
            if not self._left.acquire(timeout=_PATIENCE_S):
                raise ExperimentError(f"Every request is answered within {_PATIENCE_S} s; some were not.")
        if self.failures:
            raise ExperimentError(f"Every request must be answered; got {self.failures[0]}")


def measure(*, rate: float, phase_s: float, seed: int) -> list[dict[str, Any]]:
    """Rows of the table, one a phase."""
    buckets = [(rows, length) for rows in ROWS for length in RUNGS]
    grid = Grid.explicit(AXES, buckets)
    with tempfile.TemporaryDirectory() as folder:
        with Server(minilm_servable(grid), store=Store.open(Path(folder) / "store")) as server:
            load = Load(server, rate, seed)
            quiet = threading.Event()

            def rest() -> None:
                quiet.wait(phase_s)

            def compile_four() -> None:
                made = [server.model().cache.request(Bucket(AXES, (1, length))) for length in NEW]
                for one in made:
                    one.result(_PATIENCE_S * 10)

            def swap() -> None:
                server.replace(minilm_servable(grid))

            load.during(rest, phase_s)  # first runs
            before = compile_log().traces[REQUEST] + compile_log().compiles[REQUEST]
            actions = (rest, compile_four, rest, swap, rest)
            phases = [load.during(action, phase_s) for action in actions]
            load.close()
            on_path = compile_log().traces[REQUEST] + compile_log().compiles[REQUEST] - before
    return _rows(phases, on_path)


def _rows(phases: list[list[float]], on_path: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, phase in zip(_PHASES, phases, strict=True):
        p50, p99, worst = np.percentile(phase, (50, 99, 100)) * 1e3
        rows.append(
            {
                "phase": name,
                "requests": len(phase),
                "p50_ms": float(p50),
                "p99_ms": float(p99),
                "max_ms": float(worst),
                "compiles_on_path": on_path,
            }
        )
    for place in (1, 3):
        beside = (rows[place - 1], rows[place + 1])
        for key in ("p50", "p99"):
            quiet = sum(one[f"{key}_ms"] for one in beside) / 2
            rows[place][f"{key}_ratio"] = rows[place][f"{key}_ms"] / quiet
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 50.0,
    phase_s: Annotated[float, typer.Option(min=0.5, help="Least seconds of a phase.")] = 10.0,
    seed: int = 0,
) -> None:
    """Compile and swap under load."""
    rows = measure(rate=rate, phase_s=phase_s, seed=seed)
    columns = {
        "phase": "phase",
        "requests": "requests|d",
        "p50_ms": "p50 ms|.1f",
        "p99_ms": "p99 ms|.1f",
        "max_ms": "max ms|.1f",
        "p50_ratio": "p50 / quiet|.2f",
        "p99_ratio": "p99 / quiet|.2f",
        "compiles_on_path": "compiles on path|d",
    }
    print_table("Changes under load", columns, [{"p50_ratio": None, "p99_ratio": None} | row for row in rows])
    if json_file is not None:
        write_json(json_file, {"rows": rows, "machine": machine()})


if __name__ == "__main__":
    typer.run(main)
