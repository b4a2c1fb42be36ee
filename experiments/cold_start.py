"""Claim: from a full store a server of 48 MiniLM programs starts many times faster than by compiling, and
several times faster than with JAX's own persistent cache.

Each figure is taken in a process of its own, one after another, repeated and the median kept:

* ``cold_s``: all programs compiled.
* ``jax_cache_s``: all programs through JAX's persistent cache, filled by a run before.
* ``store_s``: all programs through the store, filled by a run before.
* ``import_s``: imports of a process that serves, weights read.
* ``ready_s``: from the start of a process over a full store until its server is ready (the program that
  covers every request is warm), imports included.

The first three count from when model and weights are in memory until the last program can run; the params are
on the device then in all three.

    python -m servax.experiments.cold_start --json cold_start.json
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import ExperimentError
from .reporting import machine, print_table, write_json

ROWS = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
_CHILD_TIMEOUT_S = 900
_KEYS = ("cold_s", "jax_cache_s", "store_s", "import_s", "ready_s")


def child(mode: str, folder: Path, programs: int) -> dict[str, float]:
    """One measurement, in this process.

    Args:
        mode: ``cold``, ``jax``, ``store`` or ``ready``.
        folder: where caches are.
        programs: how many of the buckets.
    """
    import jax

    from ..bucketing import Grid
    from ..jit_cache import StoredPrograms, compile_program
    from ..jit_cache.store import Store
    from ..server import Server
    from .minilm import minilm_servable

    buckets = [(rows, length) for length in reversed(LENGTHS) for rows in ROWS][:programs]
    servable = minilm_servable(Grid.explicit(("batch", "length"), buckets))
    imported = time.time()
    if mode == "jax":
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    store = Store.open(folder / "store", home=folder / "home")
    stored = StoredPrograms(store)
    if mode == "ready":
        server = Server(servable, compile_program=stored, ready_when="coverage").start()
        server.wait_ready()
        ready = time.time()
        server.close()
        return {"imported_at": imported, "ready_at": ready}
    leaves = [jax.block_until_ready(jax.device_put(leaf)) for leaf in servable.leaves]
    make = stored if mode == "store" else compile_program
    begin = time.perf_counter()
    for bucket in servable.grid.buckets:
        make(servable, bucket, leaves)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "loaded": float(store.report().loaded)}


def measure(repeats: int, programs: int) -> dict[str, Any]:
    """All figures, each the median over its repeats."""
    taken: dict[str, list[float]] = {key: [] for key in _KEYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home").mkdir(mode=0o700)
        for mode in ("jax", "store"):
            _spawn(mode, folder, programs)  # fills the cache
        for _ in range(repeats):
            # In turn, so that a machine that slows down slows all of them.
            for mode, key in (("cold", "cold_s"), ("jax", "jax_cache_s"), ("store", "store_s")):
                got, _ = _spawn(mode, folder, programs)
                taken[key].append(got["seconds"])
                if mode == "store" and got["loaded"] != programs:
                    raise ExperimentError(
                        f"The store was to give {programs} programs; got {got['loaded']:g}."
                    )
            got, started = _spawn("ready", folder, programs)
            taken["import_s"].append(got["imported_at"] - started)
            taken["ready_s"].append(got["ready_at"] - started)
    return {"programs": programs, "repeats": repeats} | {
        key: statistics.median(values) for key, values in taken.items()
    }


def _spawn(mode: str, folder: Path, programs: int) -> tuple[dict[str, float], float]:
    command = [
        sys.executable,
        "-m",
        "servax.experiments.cold_start",
        "--child",
        mode,
        "--folder",
        str(folder),
    ]
    started = time.time()
    done = subprocess.run(
        [*command, "--programs", str(programs)], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S
    )
    if done.returncode != 0:
        raise ExperimentError(f"The {mode} process must succeed; it printed: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result, started


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each figure.")] = 3,
    programs: Annotated[int, typer.Option(min=1, max=len(ROWS) * len(LENGTHS))] = len(ROWS) * len(LENGTHS),
    child_mode: Annotated[str, typer.Option("--child", hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure a cold start, one with JAX's persistent cache and one from the store."""
    if child_mode and folder is not None:
        print(json.dumps(child(child_mode, folder, programs)))
        return
    result = measure(repeats, programs)
    result["jax_cache_over_store"] = result["jax_cache_s"] / result["store_s"]
    result["cold_over_store"] = result["cold_s"] / result["store_s"]
    columns = {key: f"{key}|.2f" for key in (*_KEYS, "jax_cache_over_store", "cold_over_store")}
    print_table(f"Start with {programs} MiniLM programs", columns, [result])
    if json_file is not None:
        write_json(json_file, result | {"machine": machine()})


if __name__ == "__main__":
    typer.run(main)
