"""Claim: dynamic batching gains what a batch saves on the device: the size of the batch where a run takes as
long for 64 rows as for one, and on two CPU cores nearly 3 times for MiniLM on 32 tokens and 1.4 times on 128,
where one row alone runs at most of the machine's best rate. A device that waits for company (`max_wait_ms`)
answers later in all these cases; what it buys is time of the device, which runs fewer and fuller batches.

One model, in process, requests of one size. First in a closed loop: one client and buckets of one row, which
is sequential serving, against twice as many clients as the largest batch, for largest batches of 1 to 64
rows. Then in an open loop with Poisson arrivals, at half of the sequential rate and at 0.8 of the best
dynamic one (four times the sequential one at most), for windows of 0 to 20 ms; a latency counts from when its
request was due.

The devices: MiniLM on this machine at each of `--lengths` tokens; and one whose run takes 5 ms for any batch,
as on an accelerator that a small batch leaves mostly empty.

    python -m servax.experiments.dynamic_vs_sequential --json FILE --plot FILE
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..bucketing import Grid, Ladder, powers_of_two
from ..jit_cache import Servable
from ..jit_cache.store import Store
from ..server import BatchRecord, Server
from .extra import require
from .minilm import minilm_servable
from .noop import FixedDevice, noop_servable
from .open_loop import poisson
from .reporting import machine, print_table, write_json

BATCHES = (1, 2, 4, 8, 16, 32, 64)
WINDOWS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
LENGTHS = (32, 128)
_LOADED, _MOST_TIMES = 0.8, 4
_FIXED_S = 0.005
_START_S = 0.05  # until all that send are there
_COLUMNS = {
    "device": "device", "mode": "mode", "max_batch": "max batch|d", "rate": "offered/s|.0f",
    "window_ms": "window ms|.0f", "rps": "answers/s|.0f", "gain": "gain|.2f", "rows": "rows a run|.1f",
    "busy": "device busy|.0%", "p50_ms": "p50 ms|.1f", "p99_ms": "p99 ms|.1f",
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """What is served, and on what.

    Attributes:
        name: for the table.
        servable: for the most rows of a batch.
        item: the row of every request.
        options: of the server.
    """

    name: str
    servable: Callable[[int], Servable]
    item: Mapping[str, Any]
    options: Mapping[str, Any]


def minilm_device(length: int, store: Store) -> Device:
    """MiniLM on texts of so many tokens; its programs are made once and come from the store after that."""

    def servable(rows: int) -> Servable:
        ladders = {"batch": powers_of_two().ladder(rows), "length": Ladder((length,))}
        return minilm_servable(Grid.product(ladders))

    item = {"ids": np.full(length, 2000, np.int32)}
    return Device(f"MiniLM, {length} tokens", servable, item, {"store": store})


def fixed_device(seconds: float = _FIXED_S) -> Device:
    """A device whose runs take the same time for any batch."""
    options = {"compile_program": FixedDevice(seconds).compile}
    return Device(f"{seconds * 1e3:g} ms a run", noop_servable, {"x": np.zeros(16, np.float32)}, options)


@contextmanager
def serving(
    device: Device, max_batch: int, window_ms: float = 0.0
) -> Iterator[tuple[Server, list[BatchRecord]]]:
    """A warm server of it, and the records of its batches."""
    records: list[BatchRecord] = []
    options = {"max_wait_s": window_ms / 1e3, "on_batch": records.append, **device.options}
    with Server(device.servable(max_batch), **options) as server:
        yield server, records


async def closed_loop(server: Server, item: Mapping[str, Any], clients: int, seconds: float) -> list[float]:
    """Latencies in seconds of clients that each ask again as soon as they are answered."""
    latencies, model = [], server.model()
    until_s = time.perf_counter() + seconds

    async def client() -> None:
        while (begin_s := time.perf_counter()) < until_s:
            await model.submit([item])
            latencies.append(time.perf_counter() - begin_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


async def open_loop(server: Server, item: Mapping[str, Any], arrivals_s: np.ndarray) -> list[float]:
    """Latencies in seconds of requests sent when they are due, counted from then."""
    latencies, model = [], server.model()
    begin_s = time.perf_counter() + _START_S

    async def one(due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        await model.submit([item])
        latencies.append(time.perf_counter() - due_s)

    await asyncio.gather(*(one(begin_s + after_s) for after_s in arrivals_s.tolist()))
    return latencies


def _summed(latencies: Sequence[float], records: Sequence[BatchRecord], seconds: float) -> dict[str, float]:
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return {
        "rps": len(latencies) / seconds,
        "rows": sum(record.rows for record in records) / len(records),
        "busy": sum(record.seconds for record in records) / seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
    }


def _timed(server: Server, records: list[BatchRecord], load: Callable[[], Any]) -> dict[str, float]:
    del records[:]
    begin_s = time.perf_counter()
    latencies = asyncio.run(load())
    return _summed(latencies, records, time.perf_counter() - begin_s)


def throughput(device: Device, batches: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Sequential serving, then dynamic batching by the largest batch."""
    rows: list[dict[str, Any]] = []
    clients = 2 * max(batches)
    for mode, most, asked in (("sequential", 1, 1), *(("dynamic", most, clients) for most in batches)):
        with serving(device, most) as (server, records):
            asyncio.run(closed_loop(server, device.item, asked, seconds / 8))  # first runs
            found = _timed(server, records, lambda: closed_loop(server, device.item, asked, seconds))  # noqa: B023
        rows.append({"device": device.name, "mode": mode, "max_batch": most, **found})
        rows[-1]["gain"] = rows[-1]["rps"] / rows[0]["rps"]
    return rows


def windows(
    device: Device,
    max_batch: int,
    rates: Sequence[float],
    waits_ms: Sequence[float],
    seconds: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Latencies of an open loop, by the time that an idle device may wait for company."""
    rows: list[dict[str, Any]] = []
    for wait_ms in waits_ms:
        with serving(device, max_batch, wait_ms) as (server, records):
            for rate in rates:
                due_s = poisson(rate, seconds, seed)
                found = _timed(server, records, lambda: open_loop(server, device.item, due_s))  # noqa: B023
                where = {"max_batch": max_batch, "rate": rate, "window_ms": wait_ms}
                rows.append({"device": device.name, "mode": "window", **where, **found})
    return rows


def measure(
    devices: Sequence[Device], *, batches: Sequence[int] = BATCHES, waits_ms: Sequence[float] = WINDOWS_MS,
    seconds: float, seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the table."""
    rows = []
    for device in devices:
        by_batch = throughput(device, batches, seconds)
        best = max(by_batch[1:], key=lambda row: row["rps"])
        alone_rps = by_batch[0]["rps"]
        # Far above, this client, on the same cores, would be what is measured.
        rates = (alone_rps / 2, min(_LOADED * best["rps"], _MOST_TIMES * alone_rps))
        rows += [*by_batch, *windows(device, best["max_batch"], rates, waits_ms, seconds, seed)]
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure into this file.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the texts.")] = ",".join(map(str, LENGTHS)),
    ideal: Annotated[
        bool, typer.Option(help="Also the device that takes the same time for any batch.")
    ] = True,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each point.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
) -> None:
    """Compare dynamic with sequential serving of the same model."""
    if plot is not None:
        require("matplotlib")
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "store", home=Path(folder))
        devices = [minilm_device(int(one), store) for one in lengths.split(",") if one]
        rows = measure([*devices, *([fixed_device()] if ideal else [])], seconds=seconds, seed=seed)
    print_table("Dynamic against sequential serving", _COLUMNS, rows)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), "seconds": seconds, "seed": seed, "rows": rows})
    if plot is not None:
        from .dynamic_figure import draw_dynamic

        draw_dynamic(plot, rows)


if __name__ == "__main__":
    typer.run(main)
