"""Claim: at ten times its capacity a server goes on at full capacity, answers what it admits in time, and
refuses the rest at once, with the time to come again.

An open-loop client (it sends by the clock, whatever comes back) over HTTP against a server process whose
model takes a fixed time for a batch. Every request has a deadline.

* ``capacity_rps``: answers a second of a closed loop that keeps the device full, on the same server before;
  ``nominal_rps`` is what the model's own time allows.
* ``goodput``: answers in time a second over that capacity.
* ``p99_ms``: of the answers; ``late``: answers past the deadline.
* ``refused``, ``refusal_p50_ms``, ``refusal_p99_ms``, ``first_refusal_ms``: refusals and how long they took.
* ``recovery_ms``: one request, one second after the load ended.

    python -m servax.experiments.overload --json overload.json
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .errors import ExperimentError
from .noop import FixedDevice, noop_servable, rss_bytes
from .reporting import machine, print_table, write_json

_ROWS, _RUN_S, _LENGTH = 4, 0.05, 4
NOMINAL = _ROWS / _RUN_S
_CONNECTIONS = 400


def serve_child(queue_rows: int) -> None:
    """Serve until stdin ends; prints the port."""
    from ..server import QueueLimits, Server
    from ..server.http.asgi import create_app
    from ..server.http.testing import running

    sys.setswitchinterval(0.0005)  # as `servax serve` does
    device = FixedDevice(_RUN_S)
    with Server(
        noop_servable(_ROWS, _LENGTH),
        compile_program=device.compile,
        queue=QueueLimits(rows=queue_rows),
        max_request_rows=_ROWS,
    ) as server:
        with running(create_app(server)) as url:
            print(url.rsplit(":", 1)[1], flush=True)
            sys.stdin.read()


def _request(timeout_s: float) -> bytes:
    values = ",".join(["1"] * _LENGTH)
    tensor = f'{{"name":"x","shape":[1,{_LENGTH}],"datatype":"FP32","data":[{values}]}}'
    body = f'{{"inputs":[{tensor}],"parameters":{{"timeout":{round(timeout_s * 1e6)}}}}}'
    head = "POST /v2/models/noop/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


class _Client(asyncio.Protocol):
    """One connection, one request at a time; it tells the pool when it is free again."""

    def __init__(self, pool: "_Pool") -> None:
        self._pool = pool
        self._buffer = b""
        self._due_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def abort(self) -> None:
        self._transport.abort()

    def send(self, due_s: float, request: bytes) -> None:
        self._due_s = due_s
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        mark = buffer.lower().find(b"content-length: ", 0, head)
        if len(buffer) < head + 4 + int(buffer[mark + 16 : buffer.find(b"\r\n", mark)]):
            return
        self._buffer = b""
        self._pool.answered(self, int(buffer[9:12]), time.perf_counter() - self._due_s)


class _Pool:
    """Connections, and what came back: (status, seconds since the request was due)."""

    def __init__(self) -> None:
        self.all: list[_Client] = []
        self.free: list[_Client] = []
        self.seen: list[tuple[int, float]] = []
        self.unsent = 0

    async def close(self) -> None:
        """Close the connections; their ends are seen by the loop before it is gone."""
        for client in self.all:
            client.abort()
        await asyncio.sleep(0.05)

    def answered(self, client: _Client, status: int, seconds: float) -> None:
        self.seen.append((status, seconds))
        self.free.append(client)


async def _open(port: int) -> _Pool:
    pool, loop = _Pool(), asyncio.get_running_loop()
    for _ in range(_CONNECTIONS):
        _, client = await loop.create_connection(lambda: _Client(pool), "127.0.0.1", port)
        pool.all.append(client)
    pool.free = list(pool.all)
    return pool


async def load(port: int, rate: float, seconds: float, timeout_s: float) -> _Pool:
    """Send at a rate, Poisson arrivals, each timed from when it was due."""
    pool = await _open(port)
    request = _request(timeout_s)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, round(rate * seconds)))
    begin_s = time.perf_counter()
    for due_s in (begin_s + arrivals).tolist():
        while (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        if pool.free:
            pool.free.pop().send(due_s, request)
        else:
            pool.unsent += 1  # all connections wait: a client would have given up
            await asyncio.sleep(0)
    await asyncio.sleep(max(1.0, 2 * timeout_s))
    await pool.close()
    return pool


async def capacity(port: int, seconds: float) -> float:
    """Answers a second with always three batches of requests in flight."""
    pool = await _open(port)
    request, begin_s = _request(60.0), time.perf_counter()
    spare = len(pool.free) - 3 * _ROWS
    while time.perf_counter() < begin_s + seconds:
        while len(pool.free) > spare:
            pool.free.pop().send(time.perf_counter(), request)
        await asyncio.sleep(0.001)
    rate = sum(status == 200 for status, _ in pool.seen) / (time.perf_counter() - begin_s)
    await pool.close()
    return rate


async def _one(port: int, timeout_s: float) -> float:
    pool = await _open(port)
    pool.free.pop().send(time.perf_counter(), _request(timeout_s))
    while not pool.seen:
        await asyncio.sleep(0.001)
    await pool.close()
    status, seconds = pool.seen[0]
    if status != 200:
        raise ExperimentError(f"A second after the load the server must answer; it said {status}.")
    return seconds


def measure(times: float, seconds: float, timeout_s: float, queue_rows: int) -> dict[str, Any]:
    """Load a server of its own with so many times its capacity."""
    command = [sys.executable, "-m", "servax.experiments.overload", "--child", str(queue_rows)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise ExperimentError("A child process must have its pipes; it has none.")
        port = int(process.stdout.readline())
        try:
            full_rps = asyncio.run(capacity(port, 4.0))
            memory = rss_bytes(process.pid)
            pool = asyncio.run(load(port, times * full_rps, seconds, timeout_s))
            grown = rss_bytes(process.pid) - memory
            recovery_s = asyncio.run(_one(port, timeout_s))
        finally:
            process.stdin.close()
            process.wait(60)
    return _summary(pool, seconds, timeout_s, full_rps) | {
        "times": times,
        "memory_growth_mb": grown / 1e6,
        "recovery_ms": recovery_s * 1e3,
    }


def _summary(pool: _Pool, seconds: float, timeout_s: float, full_rps: float) -> dict[str, Any]:
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
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    times: Annotated[float, typer.Option(min=1.5, help="Offered load over capacity.")] = 10.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of load.")] = 20.0,
    timeout_s: Annotated[float, typer.Option(min=0.05, help="Deadline of each request.")] = 0.5,
    queue_rows: Annotated[int, typer.Option(min=4, help="Most rows that wait.")] = 1000,
    child: Annotated[int, typer.Option("--child", hidden=True)] = 0,
) -> None:
    """Load a server with many times its capacity and see what it does."""
    if child:
        serve_child(child)
        return
    found = measure(times, seconds, timeout_s, queue_rows)
    rows = [{"what": key, "value": value} for key, value in found.items()]
    print_table("Overload", {"what": "figure", "value": "value|,.2f"}, rows)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **found})


if __name__ == "__main__":
    typer.run(main)
