"""Claim: after warm-up nothing grows: requests of a thousand lengths over eight buckets hold eight programs,
and the resident memory after 50,000 of them is that after 5,000, within 2 %.

Requests are sent by several threads in bursts, as a service sees them; the process is one of its own, so that
nothing else counts. Memory is read between bursts, when nothing is in flight.

    python -m servax.experiments.steady_memory --json steady_memory.json
"""

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .errors import ExperimentError
from .reporting import machine, print_table, write_json

LENGTHS = 1000
RUNGS = (125, 250, 375, 500, 625, 750, 875, 1000)
_BURST = 250
_TIMEOUT_S = 1800


def child(requests: int, points: int) -> dict[str, Any]:
    """Serve requests of random lengths in this process, and read its memory now and then.

    Args:
        requests: how many.
        points: how many readings, evenly spread; the first is after a ``points``-th of the requests.
    """
    import jax.numpy as jnp

    from ..jit_cache import Servable, compile_log
    from ..jit_cache.device_memory import resident_bytes
    from ..server import Server

    weights = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)

    def mean(params: Any, *, x: Any, mask: Any) -> Any:
        hidden = jnp.tanh(x[..., None] * params.reshape(-1))
        return jnp.where(mask[..., None], hidden, 0.0).sum(1) / mask.sum(1)[:, None]

    servable = Servable(
        mean,
        weights,
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"batch": 1, "length": LENGTHS},
        scheme={"batch": [1], "length": list(RUNGS)},
    )
    rng = np.random.default_rng(1)
    readings = []
    with Server(servable, seal=True) as server:
        model, before = server.model(), compile_log().total()[1]
        done = 0
        for point in range(points):
            until = requests * (point + 1) // points
            while done < until:
                lengths = rng.integers(1, LENGTHS + 1, size=min(_BURST, until - done))
                rows = [[{"x": np.ones(length, np.float32)}] for length in lengths]
                futures: list[Future[Any]] = [model.run_threaded(one) for one in rows]
                for future in futures:
                    future.result()
                done += len(futures)
            readings.append({"requests": done, "rss_bytes": resident_bytes()})
        return {
            "programs": len(model.cache.ready()),
            "compiles": compile_log().total()[1] - before,
            "readings": readings,
        }


def measure(requests: int, points: int = 10) -> dict[str, Any]:
    """The same in a process of its own, with the growth from the first to the last reading."""
    command = [sys.executable, "-m", "servax.experiments.steady_memory", "--child"]
    done = subprocess.run(
        [*command, "--requests", str(requests), "--points", str(points)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ExperimentError(f"The process must succeed; it printed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    first, last = (found["readings"][place]["rss_bytes"] for place in (0, -1))
    return found | {
        "requests": requests,
        "first_mib": first / 2**20,
        "last_mib": last / 2**20,
        "growth": last / first - 1,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests in all.")] = 50_000,
    points: Annotated[int, typer.Option(min=2, help="Readings of the memory.")] = 10,
    in_child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Serve requests of a thousand lengths and watch the process's memory."""
    if in_child:
        print(json.dumps(child(requests, points)))
        return
    result = measure(requests, points)
    columns = {
        "requests": "requests",
        "programs": "programs",
        "compiles": "compiles",
        "first_mib": "RSS after a tenth, MiB|.1f",
        "last_mib": "RSS at the end, MiB|.1f",
        "growth": "growth|.4f",
    }
    print_table("Memory of a warm server", columns, [result])
    if json_file is not None:
        write_json(json_file, result | {"machine": machine()})


if __name__ == "__main__":
    typer.run(main)
