"""Claim: packed rows in 25 programs give 80 % of the rate of the best single program in useful tokens at 16
clients and 89 % at 64, where powers of two give 72 and 76 %.

MiniLM on the packaged texts, in one process: 1, 16 and 64 clients in a closed loop, every way of making
buckets in turn, several rounds, medians. Beside each rate stands the share of the best program's rate, which
is measured in the same run, and what was computed for padding.

    python -m servax.experiments.layouts --json layouts.json
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ..bucketing import Grid, fitted, packed_grid, powers_of_two
from ..jit_cache import Servable
from ..jit_cache.packed import PackedServable
from ..server import BatchRecord, Server
from .minilm import load_minilm, minilm_servable, token_ids
from .reporting import machine, print_table, write_json
from .traces import TEXT_LIMIT, load_texts, load_trace

SEGMENTS = 16
ROUNDS = 3
# Beyond this a batch gains nothing on two cores and keeps others waiting.
_MAX_ELEMENTS = 512


@dataclass
class Contender:
    """One way of making buckets, served, what its batches were, and tokens a second of its best one."""

    name: str
    servable: Servable
    records: list[BatchRecord] = field(default_factory=list)
    server: Server | None = None
    warm_s: float = 0.0
    best: float = 0.0


def contenders(seed: int, *, quick: bool = False) -> list[Contender]:
    """The ways that are compared; the fitted ladders are fitted to half of the texts."""
    seen, _ = load_trace("texts", seed=seed).halves()
    twos = Grid.product(
        {"batch": powers_of_two().ladder(32), "length": powers_of_two(16).ladder(TEXT_LIMIT)},
        max_elements=2048,
    )
    tight = Grid.product(
        {"batch": powers_of_two().ladder(16), "length": fitted(seen.lengths, 10).ladder(TEXT_LIMIT)},
        max_elements=_MAX_ELEMENTS,
    )
    rows = packed_grid(TEXT_LIMIT)
    if quick:
        twos = tight = rows = Grid.parse("1x64 4x64 1x256", ("batch", "length"))
    return [
        Contender("powers of two", minilm_servable(twos)),
        Contender("fitted", minilm_servable(tight)),
        Contender("fitted, switched", minilm_servable(tight, sizes="switched")),
        Contender("packed", packed_minilm(rows)),
    ]


def packed_minilm(grid: Grid) -> PackedServable:
    """MiniLM in the packed layout."""
    apply = partial(load_minilm().apply_packed, max_segments=SEGMENTS)
    return PackedServable(minilm_servable(grid), apply, max_segments=SEGMENTS)


def start(one: Contender, stack: ExitStack) -> None:
    """Serve it; noted are seconds of its warm-up, and the best rate there, where batches are full."""
    begin = time.perf_counter()
    one.server = stack.enter_context(Server(one.servable, on_batch=one.records.append))
    one.warm_s = time.perf_counter() - begin
    measured = one.server.models["minilm"].cost.measured()
    one.best = max(bucket.elements / seconds for bucket, seconds in measured.items())


async def drive(server: Server, texts: Sequence[NDArray[np.int32]], clients: int) -> list[float]:
    """Answer all texts, so many at a time; the latency of each in seconds."""
    model, waiting, latencies = server.models["minilm"], deque(texts), []

    async def client() -> None:
        while waiting:
            ids = waiting.popleft()
            begin = time.perf_counter()
            await model.submit([{"ids": ids}])
            latencies.append(time.perf_counter() - begin)

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


def replay(one: Contender, texts: Sequence[NDArray[np.int32]], clients: int) -> dict[str, float]:
    """One replay, summed up."""
    if one.server is None:
        raise RuntimeError(f"{one.name} is to be started first")
    del one.records[:]
    begin = time.perf_counter()
    latencies = asyncio.run(drive(one.server, texts, clients))
    seconds = time.perf_counter() - begin
    one.best = max(one.best, *(record.real / record.seconds for record in one.records))
    real = sum(len(ids) for ids in texts)
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return {
        "texts_per_s": len(texts) / seconds,
        "tokens_per_s": real / seconds,
        "waste": 1 - sum(record.real for record in one.records) / sum(r.computed for r in one.records),
        "batches": len(one.records),
        "busy": sum(record.seconds for record in one.records) / seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
    }


def measure(
    clients: Sequence[int], texts: int, seed: int, *, rounds: int = ROUNDS, quick: bool = False
) -> tuple[list[dict[str, Any]], float]:
    """Rows of the table, and the real tokens a second of the best run of any program."""
    ids = [one[:TEXT_LIMIT] for one in token_ids([text.text for text in load_texts(seed=seed)])]
    chosen = ids[len(ids) // 2 :][:texts]
    found: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    with ExitStack() as stack:
        running = contenders(seed, quick=quick)
        for one in running:
            start(one, stack)
        for _ in range(rounds):
            for count in clients:
                for one in running:
                    some = chosen if count > 1 else chosen[: max(1, texts // 4)]
                    found.setdefault((one.name, count), []).append(replay(one, some, count))
        best = max(one.best for one in running)
        rows: list[dict[str, Any]] = [
            {
                "layout": one.name,
                "programs": len(one.servable.grid),
                "warm_s": one.warm_s,
                "clients": count,
                **{key: median(run[key] for run in runs) for key in runs[0]},
            }
            for one in running
            for count in clients
            for runs in [found[one.name, count]]
        ]
    for row in rows:
        row["share_of_best"] = row["tokens_per_s"] / best
    return rows, best


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts of one replay.")] = 600,
    rounds: Annotated[int, typer.Option(min=1)] = ROUNDS,
    quick: Annotated[bool, typer.Option(help="Few programs and texts: whether it works, no result.")] = False,
    seed: int = 0,
) -> None:
    """Compare the layouts under a closed loop."""
    clients = (1, 4) if quick else (1, 16, 64)
    rows, best = measure(clients, 12 if quick else texts, seed, rounds=1 if quick else rounds, quick=quick)
    columns = {
        "layout": "buckets",
        "programs": "programs|d",
        "warm_s": "warm-up s|.1f",
        "clients": "clients|d",
        "texts_per_s": "texts/s|.1f",
        "tokens_per_s": "tokens/s|,.0f",
        "share_of_best": "of best program|.0%",
        "waste": "waste|.1%",
        "batches": "batches|.0f",
        "busy": "device busy|.0%",
        "p50_ms": "p50 ms|.1f",
        "p99_ms": "p99 ms|.1f",
    }
    print_table("Layouts under a closed loop", columns, rows, f"best single program: {best:,.0f} tokens/s")
    if json_file is not None:
        write_json(json_file, {"rows": rows, "best_tokens_per_s": best, "machine": machine()})


if __name__ == "__main__":
    typer.run(main)
