"""Claim: an adaptive wait is in the mean at most 2 % slower than a device that never waits, at any load; and
where runs cost about the same whatever their rows, clients that ask again when they are answered wait a third
less. A fixed window doubles or triples the latency at low load.

The server's own batcher in simulated time, over three kinds of devices and two kinds of callers: such that
come by a Poisson process, at shares of what the device can do, and such that each wait for their answer and
come again after 0.2 to 0.5 ms. Rows have lengths from 1 to 64 and pad to 16, 32 or 64. Then, in real time,
threads that ask a server again 0.2 to 1 ms after each answer, over a device that sleeps 5 ms a run.

    python -m servax.experiments.waiting --json waiting.json
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..bucketing import Bucket, Grid
from ..server.batching.batcher import Batcher, Launch, Policy
from ..server.batching.request import Request, State
from .open_loop import poisson
from .reporting import machine, print_table, write_json
from .simulate import Nobody, grid_batcher

_ROWS = 32
_LENGTHS = (16, 32, 64)
GRID = Grid.explicit(("batch", "length"), [(1 << r, n) for r in range(6) for n in _LENGTHS])
_AGAIN_S = (0.2e-3, 0.5e-3)


def _linear(fixed_s: float, row_s: float) -> Callable[[Bucket], float]:
    """Seconds of a run; a row of the least length costs three fifths of one of the greatest."""
    return lambda bucket: fixed_s + row_s * bucket.rows * (0.5 + bucket.sizes[1] / (2 * _LENGTHS[-1]))


DEVICES: Mapping[str, Callable[[Bucket], float]] = {
    "flat": _linear(2e-3, 0.02e-3),
    "between": _linear(1e-3, 0.25e-3),
    "linear": _linear(0.3e-3, 1e-3),
}
POLICIES: Mapping[str, Policy] = {
    "never": Policy(),
    "fixed 1 ms": Policy(max_wait_s=1e-3),
    "fixed 4 ms": Policy(max_wait_s=4e-3),
    "adaptive": Policy(max_wait_s=4e-3, wait="adaptive"),
}


def replay(
    batcher: Batcher,
    seconds: Callable[[Bucket], float],
    arrivals_s: list[float],
    count: int,
    rng: np.random.Generator,
    *,
    again: bool = False,
) -> np.ndarray:
    """Latencies of so many requests of one row.

    Args:
        batcher: what decides; empty.
        seconds: what runs take.
        arrivals_s: of the requests, or of the first ones.
        count: of requests.
        rng: for lengths and pauses.
        again: whether each caller asks again when it is answered.

    Returns:
        `(count,)` float64 seconds, in order of answer.
    """
    sink, upcoming, now_s = Nobody(), list(arrivals_s), 0.0
    heapq.heapify(upcoming)
    taken: list[float] = []

    def admit(until_s: float) -> None:
        while upcoming and upcoming[0] <= until_s:
            size = int(rng.integers(1, _LENGTHS[-1] + 1))
            batcher.add(Request(({},), [(size,)], arrived_s=heapq.heappop(upcoming), sink=sink))

    while len(taken) < count:
        admit(now_s)
        answer = batcher.next(now_s)
        if not isinstance(answer, Launch):
            now_s = min(answer, upcoming[0] if upcoming else math.inf)
            continue
        end_s = now_s + seconds(answer.bucket)
        for row in answer.rows:
            row.request.move(State.RUNNING)
            taken.append(end_s - row.request.arrived_s)
            if again:
                heapq.heappush(upcoming, end_s + float(rng.uniform(*_AGAIN_S)))
        admit(end_s)
        now_s = end_s
    return np.array(taken[:count])


def capacity(seconds: Callable[[Bucket], float]) -> float:
    """Rows a second in full buckets of the greatest length."""
    return _ROWS / seconds(Bucket(("batch", "length"), (_ROWS, _LENGTHS[-1])))


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks: a share of what the device can do, by a Poisson process, or so many clients in turn."""

    share: float = 0.0
    clients: int = 0

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients else f"{self.share:.0%}"

    def arrivals_s(self, seconds: Callable[[Bucket], float], count: int, seed: int) -> list[float]:
        """Of all requests, or of the first of each client."""
        if self.clients:
            return [1e-5 * client for client in range(self.clients)]
        rate = self.share * capacity(seconds)
        found: list[float] = poisson(rate, 1.2 * count / rate, seed).tolist()
        return found


LOADS = (
    *(Load(share=share) for share in (0.02, 0.1, 0.3, 0.6, 0.9)),
    *(Load(clients=clients) for clients in (1, 2, 4, 8, 16, 32)),
)


def measure(loads: Sequence[Load], count: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Mean and 99th percentile in milliseconds over all seeds, for each device, load and policy."""
    found = []
    for (device, seconds), load in itertools.product(DEVICES.items(), loads):
        row: dict[str, Any] = {"device": device, "load": str(load)}
        for name, policy in POLICIES.items():
            taken = [
                replay(
                    grid_batcher(GRID, seconds, policy),
                    seconds,
                    load.arrivals_s(seconds, count, seed),
                    count,
                    np.random.default_rng(seed),
                    again=load.clients > 0,
                )
                for seed in seeds
            ]
            row[name] = float(np.mean(taken)) * 1e3
            row[f"{name} p99"] = float(np.percentile(taken, 99)) * 1e3
        found.append(row)
    return found


def real(clients: int, requests: int, policy: Policy, seed: int = 0) -> float:
    """Mean seconds of a request, of so many for each client; the first third is not counted."""
    from ..server import Server
    from .noop import FixedDevice, noop_servable

    taken: list[float] = []

    def ask(client: int) -> None:
        rng, row = np.random.default_rng((seed, client)), np.zeros(16, np.float32)
        for _ in range(requests):
            time.sleep(rng.uniform(0.2e-3, 1e-3))
            begin_s = time.perf_counter()
            server(row)
            taken.append(time.perf_counter() - begin_s)

    with Server(
        noop_servable(_ROWS, 16),
        max_wait_s=policy.max_wait_s,
        wait=policy.wait,
        depth=1,
        compile_program=FixedDevice(5e-3).compile,
    ) as server:
        threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return float(np.mean(taken[len(taken) // 3 :]))


def measure_real(clients: Sequence[int], requests: int) -> list[dict[str, Any]]:
    """Mean milliseconds by the number of clients, for each policy."""
    return [
        {"clients": number} | {name: real(number, requests, one) * 1e3 for name, one in POLICIES.items()}
        for number in clients
    ]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    count: Annotated[int, typer.Option(min=100, help="Requests of each load and seed.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="Seeds.")] = 3,
    seed: Annotated[int, typer.Option(help="The first of them; of arrivals, lengths and pauses.")] = 0,
) -> None:
    """Compare never waiting, fixed windows and the adaptive wait."""
    rows = measure(LOADS, count, range(seed, seed + repeats))
    threads = measure_real((1, 2, 4, 8, 16), max(30, count // 30))
    columns = {"device": "device", "load": "load"}
    columns |= {key: f"{key}|.2f" for name in POLICIES for key in (name, f"{name} p99")}
    print_table("Mean latency and 99th percentile, ms", columns, rows)
    columns = {"clients": "clients"} | {name: f"{name}|.2f" for name in POLICIES}
    print_table("Mean latency in real time, ms", columns, threads)
    if json_file is not None:
        settings = {"count": count, "repeats": repeats, "seed": seed}
        write_json(json_file, {"machine": machine(), **settings, "rows": rows, "threads": threads})


if __name__ == "__main__":
    typer.run(main)
