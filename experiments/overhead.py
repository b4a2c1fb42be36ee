"""Claim: the framework around a model costs little: tens of thousands of requests a second in one process,
little latency, and most of the throughput of the bare web frameworks.

The model does nothing. Keys of the result:

* ``inprocess_rps``: requests of one row a second through `await model.run`, one event loop and the device
  thread, the best of the repeats; ``inprocess_cpu_us`` is the processor time of one, which other load on the
  machine does not change.
* ``p50_added_us``: median latency of one request at a time; the model itself takes none of it.
* ``http_rps``, ``http_bare_rps``, ``http_share``: POST infer with a JSON tensor under uvicorn, beside a
  FastAPI route on uvicorn's own protocol that reads the same body and sends the same answer.
* ``grpc_rps``, ``grpc_bare_rps``, ``grpc_share``: ModelInfer beside a bare grpc.aio handler of those bytes,
  both on uvloop.

Servers run in a process of their own, clients in this one; the bare one and ours take turns, and the median
of the shares is kept, so that a busy machine slows both.

    python -m servax.experiments.overhead --json overhead.json
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..jit_cache.switches import SWITCH_S
from .errors import ExperimentError
from .noop import FixedDevice, noop_servable
from .reporting import machine, print_table, write_json

_ROUTE = "/v2/models/noop/infer"
_CONNECTIONS = 32
_LENGTH = 16


def inprocess(requests: int, at_once: int = 1024) -> dict[str, float]:
    """Requests a second and processor microseconds of one, with so many in flight."""
    from ..server import Server

    device = FixedDevice()
    with Server(noop_servable(256, _LENGTH), compile_program=device.compile) as server:
        model = server.model()
        row = {"x": np.zeros(_LENGTH, np.float32)}

        async def worker(count: int) -> None:
            for _ in range(count):
                await model.run([row])

        async def run(count: int) -> None:
            await asyncio.gather(*[worker(count // at_once) for _ in range(at_once)])

        asyncio.run(run(10 * at_once))
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        asyncio.run(run(requests))
        done = requests // at_once * at_once
        return {
            "rps": done / (time.perf_counter() - begin_s),
            "cpu_us": (time.process_time() - begin_cpu_s) / done * 1e6,
        }


def added_latency_us(requests: int) -> float:
    """Median microseconds of one request at a time, from a coroutine."""
    from ..server import Server

    async def run(model: Any) -> list[float]:
        row, taken = {"x": np.zeros(_LENGTH, np.float32)}, []
        for _ in range(requests):
            begin_s = time.perf_counter()
            await model.run([row])
            taken.append(time.perf_counter() - begin_s)
            await asyncio.sleep(0.0005)
        return taken

    with Server(noop_servable(8, _LENGTH), compile_program=FixedDevice().compile) as server:
        return statistics.median(asyncio.run(run(server.model()))) * 1e6


# -- servers, in processes of their own -----------------------------------------------------------------


def serve_child(kind: str) -> None:
    """Serve until stdin ends; prints the port."""
    sys.setswitchinterval(SWITCH_S)  # as `servax serve` does
    if kind.startswith("http"):
        from fastapi import FastAPI, Request, Response
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        from ..server import Server
        from ..server.http.asgi import create_app
        from ..server.http.testing import running

        if kind == "http":
            with Server(noop_servable(64, _LENGTH), compile_program=FixedDevice().compile) as server:
                with running(create_app(server)) as url:
                    _tell(url.rsplit(":", 1)[1])
            return
        app = FastAPI()
        answer = _http_answer()

        @app.post("/v2/models/{name}/infer")
        async def infer(name: str, request: Request) -> Response:
            await request.body()
            return Response(answer, media_type="application/json")

        with running(app, HttpToolsProtocol) as url:
            _tell(url.rsplit(":", 1)[1])
        return
    import uvloop

    uvloop.run(_serve_grpc(kind))  # the loop of `servax serve`


async def _serve_grpc(kind: str) -> None:
    import grpc

    from ..server import Server
    from ..server.rpc.messages import SERVICE
    from ..server.rpc.service import create_grpc_server, listening

    if kind == "grpc":
        with Server(noop_servable(64, _LENGTH), compile_program=FixedDevice().compile) as server:
            async with listening(create_grpc_server(server), "127.0.0.1", 0) as port:
                await asyncio.to_thread(_tell, str(port))
        return
    answer = _grpc_messages()[1]

    async def infer(raw: bytes, context: Any) -> bytes:
        return answer

    bare = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(infer)
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": method}),))
    async with listening(bare, "127.0.0.1", 0) as port:
        await asyncio.to_thread(_tell, str(port))


def _tell(port: str) -> None:
    print(port, flush=True)
    sys.stdin.read()


def _http_request() -> bytes:
    values = ",".join(["1.5"] * _LENGTH)
    tensor = f'{{"name":"x","shape":[1,{_LENGTH}],"datatype":"FP32","data":[{values}]}}'
    body = f'{{"inputs":[{tensor}]}}'.encode()
    head = f"POST {_ROUTE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _http_answer() -> bytes:
    values = ",".join(["1.5"] * _LENGTH)
    tensor = f'{{"name":"output","datatype":"FP32","shape":[1,{_LENGTH}],"data":[{values}]}}'
    return f'{{"model_name":"noop","model_version":"1","outputs":[{tensor}]}}'.encode()


def _grpc_messages() -> tuple[bytes, bytes]:
    from ..server.rpc.messages import MESSAGES
    from ..server.rpc.testing import infer_request

    raw = np.full(_LENGTH, 1.5, np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, _LENGTH], "datatype": "FP32", "data": [1.5] * _LENGTH}
    response = MESSAGES["ModelInferResponse"](model_name="noop", model_version="1", raw_output_contents=[raw])
    output = response.outputs.add()
    output.name, output.datatype = "output", "FP32"
    output.shape.extend([1, _LENGTH])
    return infer_request("noop", [tensor]).SerializeToString(), response.SerializeToString()


# -- clients, in this process ----------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Sends the same request again and again, one at a time."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._buffer = b""
        self.done = 0
        self.bad = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        mark = buffer.lower().find(b"content-length: ", 0, head)
        size = int(buffer[mark + 16 : buffer.find(b"\r\n", mark)])
        if len(buffer) < head + 4 + size:
            return
        self._buffer = b""
        self.bad += not buffer.startswith(b"HTTP/1.1 200")
        self.done += 1
        self._transport.write(self._request)


async def http_rps(port: int, seconds: float) -> float:
    """Answers a second over some connections."""
    loop = asyncio.get_running_loop()
    request = _http_request()
    made = [
        await loop.create_connection(lambda: _Connection(request), "127.0.0.1", port)
        for _ in range(_CONNECTIONS)
    ]
    connections = [protocol for _, protocol in made]
    await asyncio.sleep(0.3)
    before, begin_s = sum(one.done for one in connections), time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (sum(one.done for one in connections) - before) / (time.perf_counter() - begin_s)
    for transport, _ in made:
        transport.abort()
    await asyncio.sleep(0.05)  # the loop sees their ends before it is gone
    if any(one.bad for one in connections):
        raise ExperimentError(f"Every answer must be 200; {sum(one.bad for one in connections)} were not.")
    return rate


async def grpc_rps(port: int, seconds: float) -> float:
    """Answers a second over one channel with as many calls in flight."""
    import grpc

    from ..server.rpc.messages import SERVICE

    request = _grpc_messages()[0]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        done = 0
        until_s = time.perf_counter() + seconds + 0.3

        async def worker() -> None:
            nonlocal done
            while time.perf_counter() < until_s:
                await call(request)
                done += 1

        tasks = [asyncio.create_task(worker()) for _ in range(_CONNECTIONS)]
        await asyncio.sleep(0.3)
        before, begin_s = done, time.perf_counter()
        await asyncio.gather(*tasks)
        return (done - before) / (time.perf_counter() - begin_s)


def _measured(kind: str, client: Callable[[int, float], Awaitable[float]], seconds: float) -> float:
    command = [sys.executable, "-m", "servax.experiments.overhead", "--child", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise ExperimentError("A child process must have its pipes; it has none.")
        line = process.stdout.readline()
        if not line.strip().isdigit():
            raise ExperimentError(f"The {kind} server must print its port; it printed {line!r}.")
        try:
            return asyncio.run(_timed(client, int(line), seconds))
        finally:
            process.stdin.close()
            process.wait(60)


async def _timed(client: Callable[[int, float], Awaitable[float]], port: int, seconds: float) -> float:
    return await client(port, seconds)


def measure(repeats: int, seconds: float, requests: int) -> dict[str, Any]:
    """All figures."""
    local = [inprocess(requests) for _ in range(repeats)]
    found: dict[str, Any] = {
        "inprocess_rps": max(one["rps"] for one in local),
        "inprocess_cpu_us": min(one["cpu_us"] for one in local),
        "p50_added_us": min(added_latency_us(2000) for _ in range(repeats)),
    }
    for name, client in (("http", http_rps), ("grpc", grpc_rps)):
        pairs = [
            (_measured(name, client, seconds), _measured(f"{name}_bare", client, seconds))
            for _ in range(repeats)
        ]
        found[f"{name}_rps"] = max(ours for ours, _ in pairs)
        found[f"{name}_bare_rps"] = max(bare for _, bare in pairs)
        found[f"{name}_share"] = statistics.median(ours / bare for ours, bare in pairs)
    return found


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each figure.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Of each HTTP and gRPC measurement.")] = 3.0,
    requests: Annotated[int, typer.Option(min=2048, help="Of each in-process measurement.")] = 100_000,
    child: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Measure what the framework costs around a model that does nothing."""
    if child:
        serve_child(child)
        return
    found = measure(repeats, seconds, requests)
    rows = [{"what": key, "value": value} for key, value in found.items()]
    print_table("Overhead", {"what": "figure", "value": "value|,.2f"}, rows)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), "repeats": repeats, **found})


if __name__ == "__main__":
    typer.run(main)
