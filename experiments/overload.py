"""Claim: at ten times its capacity a server goes on at full capacity, answers what it admits in time, and
refuses the rest at once, with the time to come again. With five times as many customers as it can serve, who
leave after a short while and come again, it does not run what nobody waits for.

An open-loop client (it sends by the clock, whatever comes back) over HTTP against a server process whose
model takes a fixed time for a batch. Every request has a deadline.

* ``capacity_rps``: answers a second of a closed loop that keeps the device full, on the same server before;
  ``nominal_rps`` is what the model's own time allows.
* ``goodput``: answers in time a second over that capacity.
* ``p99_ms``: of the answers; ``late``: answers past the deadline.
* ``refused``, ``refusal_p50_ms``, ``refusal_p99_ms``, ``first_refusal_ms``: refusals and how long they took.
* ``recovery_ms``: one request, one second after the load ended.
* ``client_lag_p99_ms``: how late the client itself sent; that is part of all times above.

And of the impatient customers, for a run of 20 ms and a patience of 100 ms, which the server is told or not:

* ``customers_served``, ``gave_up``, ``refused``: shares of customers; tries of each kind.
* ``in_vain``: runs without an answer in time, as a share of all runs.

    python -m servax.experiments.overload --json overload.json
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from ..jit_cache.switches import SWITCH_S
from .errors import ExperimentError
from .http_load import Impatient, Pool, answers_a_second, infer_request, send_by_clock
from .noop import FixedDevice, noop_servable, rss_bytes
from .reporting import machine, print_table, write_json

_ROWS, _RUN_S, _LENGTH = 4, 0.05, 4
NOMINAL = _ROWS / _RUN_S
_CONNECTIONS = 400
_IMPATIENT_RUN_S, _PATIENCE_S, _RETRIES = 0.02, 0.1, 3
_PARTS = ("impatient", "impatient_untold")
T = TypeVar("T")


def serve_child(rows: int, run_s: float, queue_rows: int) -> None:
    """Serve until stdin ends; prints the port, and in the end the number of runs."""
    from ..server import QueueLimits, Server
    from ..server.http.asgi import create_app
    from ..server.http.testing import running

    sys.setswitchinterval(SWITCH_S)  # as `servax serve` does
    device = FixedDevice(run_s)
    with Server(
        noop_servable(rows, _LENGTH),
        compile_program=device.compile,
        queue=QueueLimits(rows=queue_rows),
        max_request_rows=rows,
        seal=True,
    ) as server:
        device.runs = 0
        with running(create_app(server)) as url:
            print(url.rsplit(":", 1)[1], flush=True)
            sys.stdin.read()
    print(device.runs, flush=True)


class _Child:
    """A server process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        if process.stdin is None or process.stdout is None:
            raise ExperimentError("A child process must have its pipes; it has none.")
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self.pid, self.port = process.pid, int(self._out.readline())

    def end(self) -> int:
        """Close it; how many runs there were."""
        self._in.close()
        runs = int(self._out.readline() or 0)
        self._process.wait(60)
        return runs


@contextmanager
def _serving(rows: int, run_s: float, queue_rows: int) -> Iterator[_Child]:
    given = [str(rows), str(run_s), str(queue_rows)]
    command = [sys.executable, "-m", "servax.experiments.overload", "--child", ",".join(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = _Child(process)
        try:
            yield child
        finally:
            if process.poll() is None:
                child.end()


def _with_pool(port: int, connections: int, use: Callable[[Pool], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        pool = await Pool(port).fill(connections)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


async def _capacity(pool: Pool, rows: int, seconds: float) -> float:
    return await answers_a_second(pool, infer_request(_LENGTH, 60.0), 3 * rows, seconds)


async def _load(pool: Pool, rate: float, seconds: float, timeout_s: float) -> Pool:
    await send_by_clock(pool, infer_request(_LENGTH, timeout_s), rate, seconds)
    await asyncio.sleep(max(1.0, 2 * timeout_s))
    return pool


async def _one(pool: Pool) -> float:
    pool.send(time.perf_counter(), infer_request(_LENGTH, 5.0))
    while not pool.seen:
        await asyncio.sleep(0.001)
    status, seconds = pool.seen[0]
    if status != 200:
        raise ExperimentError(f"A second after the load the server must answer; it said {status}.")
    return seconds


def measure(times: float, seconds: float, timeout_s: float, queue_rows: int) -> dict[str, Any]:
    """Load a server of its own with so many times its capacity."""
    with _serving(_ROWS, _RUN_S, queue_rows) as child:
        full_rps = _with_pool(child.port, 4 * _ROWS, lambda pool: _capacity(pool, _ROWS, min(4.0, seconds)))
        memory = rss_bytes(child.pid)
        pool = _with_pool(
            child.port, _CONNECTIONS, lambda pool: _load(pool, times * full_rps, seconds, timeout_s)
        )
        grown = rss_bytes(child.pid) - memory
        recovery_s = _with_pool(child.port, 1, _one)
    return _summary(pool, seconds, timeout_s, full_rps) | {
        "times": times,
        "memory_growth_mb": grown / 1e6,
        "recovery_ms": recovery_s * 1e3,
    }


def impatient(times: float, seconds: float, *, told: bool) -> dict[str, Any]:
    """Customers who leave and come again; whether the server is told how long they wait."""
    request = infer_request(_LENGTH, _PATIENCE_S if told else None)

    async def come(pool: Pool) -> Impatient:
        customers = Impatient(pool, request, _PATIENCE_S, _RETRIES)
        await customers.come(times * full_rps, seconds)
        await asyncio.sleep(1.0)
        return customers

    warm_s = min(2.0, seconds)
    with _serving(1, _IMPATIENT_RUN_S, 1000) as child:
        full_rps = _with_pool(child.port, 4, lambda pool: _capacity(pool, 1, warm_s))
        found = _with_pool(child.port, 50, come)
        recovery_s = _with_pool(child.port, 1, _one)
        runs = child.end() - round(warm_s * full_rps)
    good = np.array(found.good)
    everybody = len(good) + found.lost
    return {
        "capacity_rps": full_rps,
        "goodput": len(good) / (good.max() - good.min()) / full_rps if len(good) > 1 else 0.0,
        "customers_served": len(good) / everybody,
        "gave_up": found.gave_up,
        "refused": found.refused,
        "in_vain": max(0.0, 1 - len(good) / runs),
        "recovery_ms": recovery_s * 1e3,
    }


def _summary(pool: Pool, seconds: float, timeout_s: float, full_rps: float) -> dict[str, Any]:
    good = np.array([s for status, s in pool.seen if status == 200]) * 1e3
    refused = np.array([s for status, s in pool.seen if status == 429]) * 1e3
    others = sorted({status for status, _ in pool.seen} - {200, 429, 504})
    if others or not len(good) or not len(refused):
        raise ExperimentError(f"Answers and refusals were due; got {len(good)}, {len(refused)} and {others}.")
    late = int((good > timeout_s * 1e3).sum())
    return {
        "nominal_rps": NOMINAL,
        "capacity_rps": full_rps,
        "goodput": (len(good) - late) / seconds / full_rps,
        "p50_ms": float(np.percentile(good, 50)),
        "p99_ms": float(np.percentile(good, 99)),
        "deadline_ms": timeout_s * 1e3,
        "late": late,
        "expired": sum(status == 504 for status, _ in pool.seen),
        "refused": len(refused),
        "unsent": pool.unsent,
        "first_refusal_ms": float(refused[0]),
        "refusal_p50_ms": float(np.percentile(refused, 50)),
        "refusal_p99_ms": float(np.percentile(refused, 99)),
        "client_lag_p99_ms": float(np.percentile(pool.lags, 99)) * 1e3,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    times: Annotated[float, typer.Option(min=1.5, help="Offered load over capacity.")] = 10.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of load.")] = 20.0,
    timeout_s: Annotated[float, typer.Option(min=0.05, help="Deadline of each request.")] = 0.5,
    queue_rows: Annotated[int, typer.Option(min=4, help="Most rows that wait.")] = 1000,
    child: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Load a server with many times its capacity and see what it does."""
    if child:
        batch, run_s, queue = child.split(",")
        serve_child(int(batch), float(run_s), int(queue))
        return
    found = measure(times, seconds, timeout_s, queue_rows)
    found["impatient"] = impatient(5.0, seconds / 2, told=True)
    found["impatient_untold"] = impatient(5.0, seconds / 2, told=False)
    for title, part in (("Overload", found), *((name, found[name]) for name in _PARTS)):
        rows = [{"what": key, "value": value} for key, value in part.items() if key not in _PARTS]
        print_table(title, {"what": "figure", "value": "value|,.2f"}, rows)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **found})


if __name__ == "__main__":
    typer.run(main)
