"""Claim: behind a router that takes the less loaded of two replicas, a thousand replicas keep the latency of
ten; choosing at random does not. Replicas that specialise in lengths pad a third as much, or need a quarter
of the programs, but share their load less well.

Simulated: every replica asks the server's own batcher, costs are linear in the computed tokens. The lengths
are those of the packaged texts, ladders are fitted on the first half and run on the second, arrivals are
Poisson. Only `one process` is measured.

* `routing`: 10 to 1,000 replicas under one load, by router.
* `faults`: a hundred replicas of which one hangs, or ten crash at once.
* `surge`: load doubles at once; how many answers are late, by the seconds that a new replica takes to start.
* `start`: seconds until all of a fleet are ready, from one shared store or by compiling.
* `million`: a million requests a second on devices of a million tokens a second.
* `one process`: requests a second by the number of devices behind one queue, see `replicas`.

    python -m servax.experiments.scale --quick --json scale.json --figures plots
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ..bucketing import Grid, Ladder, fit_ladder
from ..server.batching.batcher import Batcher
from . import replicas as one_process
from .cost_table import LinearCost
from .extra import require
from .fleet import Autoscaler, Fault, Fleet, FleetRun, Replica
from .reporting import machine, print_table, write_json
from .routers import Bands, Random, Two
from .simulate import grid_batcher
from .traces import Trace, load_trace

# MiniLM on 2 cores: 15,000 computed tokens a second (see `layouts`); and a device of a million, a prior.
CPU = LinearCost(1e-3, 1 / 15_000)
ACCELERATOR = LinearCost(3e-4, 1e-6)
ROWS = (1, 2, 4, 8, 16, 32)
PROGRAMS, BANDS = 12, 4
LATE_S = 1.0
# From `cold_start`: 48 programs of MiniLM, their bytes and those of the weights; the link is 10 Gbit/s.
COMPILE_S, LOAD_S, PROCESS_S = 20.0, 0.6, 1.1
PROGRAM_BYTES, WEIGHT_BYTES, LINK_BYTES_S = 10e6, 91e6, 1.25e9
ROUTERS = ("random", "two", "bands", "bands, fine")
COLUMNS = {
    "what": "what",
    "replicas": "replicas|,d",
    "router": "router",
    "requests_per_s": "requests/s|,.0f",
    "programs": "lengths a replica|,d",
    "waste": "padding|.1%",
    "p50_ms": "p50 ms|,.0f",
    "p99_ms": "p99 ms|,.0f",
    "late": "later than 1 s|.2%",
}


class World:
    """Lengths to fit on and to run, and the costs of a device.

    Args:
        cost: Seconds of a bucket.
        seed: Of the shuffle of the texts, of arrivals and of routers.
        rows: Sizes of the batch.
        max_elements: Most tokens of a bucket.
    """

    def __init__(
        self, cost: LinearCost, seed: int, rows: tuple[int, ...] = ROWS, max_elements: int = 2048
    ) -> None:
        self.cost, self.seed, self.rows, self.max_elements = cost, seed, rows, max_elements
        self.seen, self.tested = load_trace("texts", seed=seed).halves()

    def requests(self, per_s: float, seconds: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Poisson arrivals at a rate, and their lengths."""
        rng = np.random.default_rng(self.seed)
        count = int(per_s * seconds)
        arrivals = np.cumsum(rng.exponential(1 / per_s, count))
        return rng.choice(self.tested.lengths, count), arrivals

    def rate(self, replicas: int, load: float) -> float:
        """Requests a second whose real tokens keep so much of the devices busy."""
        return load * replicas / (float(self.tested.lengths.mean()) * self.cost.token_s)

    def batcher(self, ladder: Ladder) -> Callable[[], Batcher]:
        """Makes batchers over a ladder of lengths and the usual rows."""
        grid = Grid.product({"batch": Ladder(self.rows), "length": ladder}, max_elements=self.max_elements)
        return lambda: grid_batcher(grid, self.cost)

    def fleet(self, router: str, replicas: int, **options: Any) -> tuple[Fleet, int]:
        """A fleet, and the lengths that each replica has programs for."""
        if not router.startswith("bands"):
            make = self.batcher(fit_ladder(self.seen.lengths, programs=PROGRAMS, limit=self.seen.limit))
            chosen = Random() if router == "random" else Two()
            members = [Replica(make) for _ in range(replicas)]
            return Fleet(members, chosen, self.cost, seed=self.seed, **options), PROGRAMS
        cuts, each = (
            cut_bands(self.seen, self.cost),
            PROGRAMS if router.endswith("fine") else PROGRAMS // BANDS,
        )
        makers = []
        for low, high in zip((0, *cuts), cuts, strict=False):
            inside = self.seen.lengths[(self.seen.lengths > low) & (self.seen.lengths <= high)]
            makers.append(self.batcher(fit_ladder(inside, programs=each, limit=high)))
        members = [Replica(makers[place % BANDS], place % BANDS) for place in range(replicas)]
        return Fleet(members, Bands(cuts), self.cost, seed=self.seed, **options), each


def cut_bands(seen: Trace, cost: LinearCost) -> tuple[int, ...]:
    """The longest length of each band; bands have equal shares of the device's time."""
    lengths = np.sort(seen.lengths)
    work = np.cumsum(cost.overhead_s / 2 + cost.token_s * lengths)  # two requests a run, more or less
    places = [int(np.searchsorted(work, work[-1] * (band + 1) / BANDS)) for band in range(BANDS - 1)]
    return (*(int(lengths[place]) for place in places), seen.limit)


def summary(run: FleetRun, **facts: Any) -> dict[str, Any]:
    """One row of the tables; the first tenth of the requests, when queues are still empty, is left out."""
    latency = run.latency_s[len(run.latency_s) // 10 :]
    p50, p99 = np.percentile(latency, (50, 99)).tolist()
    return {
        **facts,
        "requests": len(run.done_s),
        "waste": run.waste,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "late": float((latency > LATE_S).mean()),
        "moved": run.moved,
        "joined": len(run.joined_s),
        "last_late_s": float(run.arrivals_s[run.latency_s > LATE_S].max(initial=0.0)),
    }


def routing(world: World, sizes: Sequence[int], load: float, seconds: float) -> list[dict[str, Any]]:
    """Fleets of several sizes under one load, by router."""
    rows = []
    for replicas in sizes:
        per_s = world.rate(replicas, load)
        for router in ROUTERS:
            fleet, programs = world.fleet(router, replicas)
            run = fleet.run(*world.requests(per_s, seconds))
            facts = {"replicas": replicas, "router": router, "requests_per_s": per_s, "programs": programs}
            rows.append(summary(run, what=f"load {load:.0%}", **facts))
    return rows


def faults(world: World, replicas: int, load: float, seconds: float) -> list[dict[str, Any]]:
    """One replica in a hundred hangs, or one in ten crashes at once, a third into the run."""
    hang = [Fault(seconds / 3, place, "hang", seconds / 3) for place in range(max(1, replicas // 100))]
    crash = [Fault(seconds / 3, place, "crash", seconds / 6) for place in range(max(1, replicas // 10))]
    per_s, rows = world.rate(replicas, load), []
    for what, struck in (("1 % hang", hang), ("10 % crash", crash)):
        for router in ROUTERS[:3]:
            fleet, programs = world.fleet(router, replicas, faults=struck)
            run = fleet.run(*world.requests(per_s, seconds))
            facts = {"replicas": replicas, "router": router, "requests_per_s": per_s, "programs": programs}
            rows.append(summary(run, what=what, **facts))
    return rows


def surge(world: World, replicas: int, starts_s: Sequence[float], seconds: float) -> list[dict[str, Any]]:
    """Load rises from 50 % to 150 % of the first replicas' capacity, a sixth into the run."""
    calm = world.requests(world.rate(replicas, 0.5), seconds / 6)
    high = world.requests(world.rate(replicas, 1.5), seconds * 5 / 6)
    lengths = np.concatenate([calm[0], high[0]])
    arrivals = np.concatenate([calm[1], high[1] + seconds / 6])
    rows = []
    for start_s, waiting in itertools.product(starts_s, (None, 32)):
        rule = Autoscaler(interval_s=15.0, target=0.6, start_s=start_s, waiting=waiting)
        fleet, programs = world.fleet("two", replicas, autoscaler=rule)
        run = fleet.run(lengths, arrivals)
        facts = {"replicas": replicas, "router": "two", "programs": programs, "start_s": start_s}
        facts |= {
            "requests_per_s": len(arrivals) / seconds,
            "rule": "busy" + (", waiting" if waiting else ""),
        }
        row = summary(run, what=f"surge, start {start_s:g} s", **facts)
        rows.append(row | {"recovered_s": max(0.0, row["last_late_s"] - seconds / 6)})
    return rows


def start(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds until the last replica of a fleet is ready, all starting at once; arithmetic, no simulation."""
    rows = []
    for replicas in sizes:
        programs, both = (
            replicas * size / LINK_BYTES_S for size in (PROGRAM_BYTES, PROGRAM_BYTES + WEIGHT_BYTES)
        )
        rows.append(
            {
                "replicas": replicas,
                "compile_s": PROCESS_S + COMPILE_S,
                "image_s": PROCESS_S + LOAD_S,
                "store_s": PROCESS_S + LOAD_S + programs,
                "store_weights_s": PROCESS_S + LOAD_S + both,
            }
        )
    return rows


def million(seed: int, per_s: float, load: float, seconds: float) -> list[dict[str, Any]]:
    """So many requests a second on as many fast devices as that load takes."""
    world = World(ACCELERATOR, seed, (*ROWS, 64, 128, 256), 16_384)
    replicas = math.ceil(per_s / world.rate(1, load))
    fleet, programs = world.fleet("two", replicas)
    run = fleet.run(*world.requests(per_s, seconds))
    facts = {"replicas": replicas, "router": "two", "requests_per_s": per_s, "programs": programs}
    return [summary(run, what="1M tokens/s a device", **facts)]


def measure(quick: bool, seed: int) -> dict[str, list[dict[str, Any]]]:
    """All parts."""
    measured = one_process.measure(10 if quick else 50)  # first, while JAX may still be given devices
    world = World(CPU, seed)
    sizes = (10, 40) if quick else (10, 100, 1000)
    return {
        "routing": routing(world, sizes, 0.7, 3.0 if quick else 4.0),
        "faults": faults(world, 40 if quick else 100, 0.6, 6.0 if quick else 9.0),
        "surge": surge(world, 4 if quick else 10, (5.0, 20.0, 60.0), 90.0 if quick else 180.0),
        "start": start((1, 10, 100, 1000)),
        "million": million(seed, 5e4 if quick else 1e6, 0.6, 0.2 if quick else 0.3),
        "one process": measured,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small fleets and short runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of texts, arrivals and routers.")] = 0,
) -> None:
    """Simulate fleets: routers, faults, a surge, a common start, a million requests a second."""
    if figures is not None:
        require("matplotlib")
    began = time.perf_counter()
    found = measure(quick, seed)
    more = {"rule": "scaled on", "joined": "joined|,d", "recovered_s": "late for, s|,.0f"}
    for part in ("routing", "faults", "surge", "million"):
        print_table(part, COLUMNS | (more if part == "surge" else {}), found[part])
    heads = {
        "compile_s": "compiling",
        "image_s": "warm image",
        "store_s": "shared store",
        "store_weights_s": "weights too",
    }
    columns = {"replicas": "replicas|,d"} | {key: f"{head}, s|,.0f" for key, head in heads.items()}
    print_table("start of all at once", columns, found["start"])
    one_process.show(found["one process"])
    if figures is not None:
        from .figures import draw_scale

        draw_scale(figures / "scale.png", found)
    if json_file is not None:
        write_json(json_file, found | {"machine": machine(), "seconds": time.perf_counter() - began})


if __name__ == "__main__":
    typer.run(main)
