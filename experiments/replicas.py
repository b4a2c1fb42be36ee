"""Claim: one queue keeps eight devices busy: with a model that does nothing, on devices that take a fixed
time, eight answer at least seven times as many requests a second as one.

Measured, in one process of eight virtual CPU devices; each run of a bucket sleeps as long as the device would
compute, so the host's work for it (planning, padding, answering) is all that can hold the devices up.

    python -m servax.experiments.replicas --json replicas.json
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from ..jit_cache import Servable
from ..server import Server
from .errors import ExperimentError
from .noop import FixedDevice
from .reporting import machine, print_table, write_json

DEVICES = 8
ROWS, RUN_S = 4, 0.02
COLUMNS = {
    "devices": "devices|,d",
    "requests_per_s": "requests/s|,.0f",
    "times": "times one|.2f",
    "busy": "of the devices' time|.0%",
}


def open_devices(count: int = DEVICES) -> list[jax.Device]:
    """So many virtual devices of the CPU; before anything else asks JAX for a device.

    Raises:
        ExperimentError: if JAX has been started with fewer.
    """
    with suppress(RuntimeError):  # started already; it may have enough
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise ExperimentError(
            f"this experiment runs on {count} virtual devices; JAX was started with {len(found)}: run it in "
            f"a process of its own, or set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[:count]


def rate(devices: list[jax.Device], runs_each: int) -> float:
    """Requests a second, of four rows each, that fill every device so many times."""
    servable = Servable(
        lambda x: x, inputs={"x": "float32[4]"}, limits={"batch": ROWS}, scheme={"batch": [ROWS]}, name="noop"
    )
    fixed, count = FixedDevice(RUN_S), runs_each * len(devices)
    with Server(servable, compile_program=fixed.compile, devices=devices) as server:
        model, begin_s = server.model(), time.perf_counter()
        futures = [model.run_threaded([{"x": np.full(4, n, np.float32)}] * ROWS) for n in range(count)]
        for number, future in enumerate(futures):
            if future.result(60)[0][0][0] != number:
                raise ExperimentError(f"each request gets its own answer; number {number} got another's")
        return count / (time.perf_counter() - begin_s)


def measure(runs_each: int = 50) -> list[dict[str, Any]]:
    """One, two, four and eight devices, in this order."""
    devices = open_devices()
    rows: list[dict[str, Any]] = []
    for count in (1, 2, 4, DEVICES):
        per_s = rate(devices[:count], runs_each)
        times = per_s / rows[0]["requests_per_s"] if rows else 1.0
        rows.append(
            {"devices": count, "requests_per_s": per_s, "times": times, "busy": per_s * RUN_S / count}
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print_table(f"one queue, devices of {RUN_S * 1e3:g} ms a run, measured", COLUMNS, rows)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the runs.")] = False,
) -> None:
    """Measure how requests a second grow with the devices of one process."""
    rows = measure(10 if quick else 50)
    show(rows)
    if json_file is not None:
        write_json(json_file, {"replicas": rows, "machine": machine()})


if __name__ == "__main__":
    typer.run(main)
