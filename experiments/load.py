"""Claim: up to what it answers when saturated a server over HTTP answers nearly all in time, and beyond that
as many as before; arrivals in bursts bring the edge forward. What is too much is refused within milliseconds.
Over gRPC (`--protocol grpc`) the same holds while the model is the limit.

Open-loop load over HTTP or gRPC at rising rates, with Poisson arrivals and with those of a recorded trace at
the same mean rate. Each latency counts from when its request was due (see `open_loop`). Lengths come from the
trace, brought to the limit of the model, and each request tells the server how long it may take. Against a
server that runs already, or one of its own on the loopback interface: four dense layers over 256 tokens at
most.

Keys of the result: ``capacity_rps``, answers a second with 64 requests always in flight; ``rows``, for each
kind of arrivals and each rate the offered, answered and good (in ``slo_ms``) requests a second, percentiles
in milliseconds, refusals and how fast they came, failures, how late this client itself was (`client_lag`: for
want of processor time; `client_wait`: also for want of a free connection), and whether it kept up.

    python -m servax.experiments.load --json load.json --figures figures
    python -m servax.experiments.load --protocol grpc --json load_grpc.json
    python -m servax.experiments.load --url http://127.0.0.1:8000 --model minilm --rates 50,100,200
"""

import asyncio
import itertools
import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import typer

from ..jit_cache.switches import SWITCH_S
from .errors import ExperimentError
from .extra import require
from .grpc_load import infer_call
from .open_loop import Sender, poisson, saturated
from .reporting import machine, print_table, write_json
from .traces import NAMES, Trace, load_trace

_LIMIT, _WIDTH, _IN_FLIGHT = 256, 512, 64
_KINDS = ("poisson", "trace")
_SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)
_COLUMNS = {
    "arrivals": "arrivals", "offered_rps": "offered/s|,.0f", "answered_rps": "answered/s|,.0f",
    "goodput_rps": "good/s|,.0f", "p50_ms": "p50 ms|,.1f", "p90_ms": "p90 ms|,.1f", "p99_ms": "p99 ms|,.1f",
    "refused": "refused|,", "refusal_p99_ms": "their p99 ms|,.1f", "expired": "expired|,",
    "failed": "failed|,", "unanswered": "open|,",
    "client_lag_p99_ms": "client lag ms|,.1f", "client_wait_p99_ms": "client wait ms|,.1f",
}  # fmt: skip


# -- what is asked ----------------------------------------------------------------------------------------


def described(url: str, model: str) -> Mapping[str, Any]:
    """The server's own description of a model.

    Raises:
        ExperimentError: there is no such server or model.
    """
    try:
        with urllib.request.urlopen(f"{url}/v2/models/{model}", timeout=30) as answer:
            return dict(json.load(answer))
    except OSError as error:
        raise ExperimentError(
            f"A served model is named by --url and --model; got {url} {model}: {error}"
        ) from None


def requests_of(
    model: Mapping[str, Any], lengths: Sequence[int], timeout_s: float, protocol: str = "http"
) -> list[bytes]:
    """One request of one row for each length, which is the size of every axis that varies."""
    make = _call if protocol == "grpc" else _request
    made = {length: make(model, length, timeout_s) for length in sorted(set(lengths))}
    return [made[length] for length in lengths]


def _tensors(model: Mapping[str, Any], length: int) -> list[dict[str, Any]]:
    tensors = []
    for one in model["inputs"]:
        if "instead_of" not in one.get("parameters", {}):
            shape = [1, *[length if size < 0 else size for size in one["shape"][1:]]]
            values = [True if one["datatype"] == "BOOL" else 1] * int(np.prod(shape))
            tensors.append({"name": one["name"], "shape": shape, "datatype": one["datatype"], "data": values})
    return tensors


def _call(model: Mapping[str, Any], length: int, timeout_s: float) -> bytes:
    from ..server.rpc.testing import infer_request

    return infer_call(infer_request(model["name"], _tensors(model, length)).SerializeToString(), timeout_s)


def _request(model: Mapping[str, Any], length: int, timeout_s: float) -> bytes:
    tensors = _tensors(model, length)
    parameters = {"timeout": round(timeout_s * 1e6), "binary_data_output": True}
    body = json.dumps({"inputs": tensors, "parameters": parameters}, separators=(",", ":")).encode()
    head = (
        f"POST /v2/models/{model['name']}/infer HTTP/1.1\r\nhost: servax\r\ncontent-length: {len(body)}\r\n"
    )
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def sizes_of(trace: Trace, model: Mapping[str, Any], count: int) -> list[int]:
    """Lengths of the trace, brought to the model's smallest limit and repeated as often as needed."""
    limits = [limit for axis, limit in model.get("limits", {}).items() if axis != "batch"]
    most = min(limits, default=1)
    scaled = trace.scaled(most / trace.limit, most) if trace.limit != most else trace
    return list(itertools.islice(itertools.cycle(scaled.lengths.tolist()), count))


def arrivals_of(kind: str, trace: Trace, rate: float, seconds: float, seed: int) -> np.ndarray:
    """When requests come: `poisson`, or `trace`, a part of the recording, stretched to that mean rate.

    A recording with fewer requests than are needed is repeated.
    """
    if kind == "poisson":
        return poisson(rate, seconds, seed)
    count = max(2, round(rate * seconds))
    begin = int(np.random.default_rng(seed).integers(0, max(1, len(trace) - count)))
    part = trace.part(begin, begin + count).at_rate(rate, seed)
    if part.arrivals_s is None:
        return poisson(rate, seconds, seed)
    span_s = len(part) / rate
    rounds = [part.arrivals_s + turn * span_s for turn in range(math.ceil(count / len(part)))]
    return np.concatenate(rounds)[:count]


# -- a server of its own ----------------------------------------------------------------------------------


def serve_child() -> None:
    """Serve dense layers over tokens until stdin ends; prints the URL, and the port of gRPC."""
    sys.setswitchinterval(SWITCH_S)  # as `servax serve` does
    import jax
    import jax.numpy as jnp
    import uvloop

    from ..jit_cache import Servable
    from ..server import QueueLimits, Server
    from ..server.http.asgi import create_app
    from ..server.http.testing import running
    from ..server.rpc.service import create_grpc_server
    from ..server.rpc.testing import running_grpc

    weights = jax.random.normal(jax.random.key(0), (4, _WIDTH, _WIDTH)) / _WIDTH**0.5

    def apply(params: Any, *, ids: Any, mask: Any) -> Any:
        found = jnp.where(mask, ids, 0)[..., None] * jnp.ones(_WIDTH)
        for layer in range(len(params)):
            found = jnp.tanh(found @ params[layer])
        return jnp.where(mask[..., None], found, 0).sum(1)[:, :4]

    servable = Servable(
        apply, weights, inputs={"ids": "int32[length]", "mask": "mask[length]"},
        limits={"length": _LIMIT, "batch": 16}, scheme="powers_of_two:16", name="dense",
    )  # fmt: skip
    with (
        Server(servable, queue=QueueLimits(rows=4096), seal=True) as server,
        running(create_app(server)) as url,
        running_grpc(lambda: create_grpc_server(server), run=uvloop.run) as address,
    ):
        print(url, address.rsplit(":", 1)[1], flush=True)
        sys.stdin.read()


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """The URL of such a server and its port of gRPC, in a process of its own."""
    command = [sys.executable, "-m", "servax.experiments.load", "--child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise ExperimentError("A child process must have its pipes; it has none.")
        try:
            url, port = process.stdout.readline().split()
            yield url, int(port)
        finally:
            process.stdin.close()
            process.wait(60)


# -- the sweep --------------------------------------------------------------------------------------------


async def _sweep(
    url: str, model: Mapping[str, Any], trace: Trace, rates: Sequence[float], kinds: Sequence[str], *,
    seconds: float, slo_s: float, seed: int, protocol: str,
) -> dict[str, Any]:  # fmt: skip
    sender = Sender(url)
    grace_s = max(2.0, 2 * slo_s)
    try:
        asked = requests_of(model, sizes_of(trace, model, 512), 10.0, protocol)
        await saturated(sender, asked, _IN_FLIGHT, min(1.0, seconds))  # connections, first runs
        full_rps = await saturated(sender, asked, _IN_FLIGHT, min(4.0, seconds))
        rows = []
        for kind, rate in itertools.product(kinds, rates or [share * full_rps for share in _SHARES]):
            times_s = arrivals_of(kind, trace, rate, seconds, seed)
            asked = requests_of(model, sizes_of(trace, model, len(times_s)), slo_s, protocol)
            outcome = await sender.run(asked, times_s, max(seconds, float(times_s[-1])), grace_s)
            rows.append({"arrivals": kind, "rate": rate, **outcome.summary(slo_s)})
    finally:
        await sender.close()
    return {"capacity_rps": full_rps, "slo_ms": slo_s * 1e3, "rows": rows}


def measure(
    url: str, model: str, trace: Trace, rates: Sequence[float] = (), kinds: Sequence[str] = _KINDS, *,
    seconds: float, slo_s: float, seed: int = 0, grpc_port: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Load a server at each rate, by default at shares of what it answers when saturated.

    Args:
        grpc_port: loads this port over gRPC; 0 is HTTP.
    """
    found, protocol = described(url, model), "grpc" if grpc_port else "http"
    target = f"grpc://{urlsplit(url).hostname}:{grpc_port}" if grpc_port else url
    sweep = _sweep(
        target, found, trace, rates, kinds, seconds=seconds, slo_s=slo_s, seed=seed, protocol=protocol
    )
    return {"model": model, "trace": trace.name, "protocol": protocol, **asyncio.run(sweep)}


def main(
    url: Annotated[str, typer.Option(help="A running server; by default one is started.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model there.")] = "dense",
    rates: Annotated[
        str, typer.Option(help="Requests a second, such as 50,100; by default shares of capacity.")
    ] = "",
    trace: Annotated[
        str, typer.Option(help=f"Lengths and bursts: {', '.join(NAMES)}.")
    ] = "azure_llm_2023_conv",
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each load.")] = 15.0,
    slo_ms: Annotated[
        float, typer.Option(min=1, help="An answer after so long is not counted as good.")
    ] = 100.0,
    seed: Annotated[int, typer.Option(help="Of arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw `load.png` in this folder.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seconds a load.")] = False,
    protocol: Annotated[str, typer.Option(help="http or grpc, to the server that is started.")] = "http",
    grpc_port: Annotated[int, typer.Option(help="gRPC to this port of the server at --url.")] = 0,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Load a server at rising rates and see how many answers are in time."""
    if child:
        serve_child()
        return
    if figures is not None:
        require("matplotlib")
    asked = [float(rate) for rate in rates.split(",") if rate]
    options: dict[str, Any] = {"seconds": 2.0 if quick else seconds, "slo_s": slo_ms / 1e3, "seed": seed}
    if url:
        found = measure(url.rstrip("/"), model, load_trace(trace), asked, grpc_port=grpc_port, **options)
    else:
        with serving() as (own, port):
            port = port if protocol == "grpc" else 0
            found = measure(own, "dense", load_trace(trace), asked, grpc_port=port, **options)
    note = f"saturated: {found['capacity_rps']:,.0f} a second; good: within {slo_ms:g} ms of when it was due"
    print_table(f"Load on {found['model']}", _COLUMNS, found["rows"], note)
    if not all(row["client_kept_up"] for row in found["rows"]):
        rates = ", ".join(f"{row['rate']:,.0f}" for row in found["rows"] if not row["client_kept_up"])
        print(
            f"This client fell behind at {rates} requests a second: it may be what was measured there.",
            file=sys.stderr,
        )
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **found})
    if figures is not None:
        from .load_figure import draw_load

        draw_load(figures / "load.png", found)


if __name__ == "__main__":
    typer.run(main)
