"""Load over HTTP for the experiments: a bare client, cheap enough to outrun the server beside it."""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def infer_request(length: int, timeout_s: float | None) -> bytes:
    """One request of one row for the model that does nothing; `timeout_s` is told to the server."""
    values = ",".join(["1"] * length)
    tensor = f'{{"name":"x","shape":[1,{length}],"datatype":"FP32","data":[{values}]}}'
    told = "" if timeout_s is None else f',"parameters":{{"timeout":{round(timeout_s * 1e6)}}}'
    body = f'{{"inputs":[{tensor}]{told}}}'
    head = "POST /v2/models/noop/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._told: Callable[[int], None] | None = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def abort(self) -> None:
        """Leave at once; nobody is told of an answer any more."""
        self._told = None
        self._transport.abort()

    def send(self, request: bytes, told: Callable[[int], None]) -> None:
        """Send; `told` gets the status of the answer."""
        self._told = told
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Tell once the answer is complete."""
        buffer = self._buffer = self._buffer + data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        mark = buffer.lower().find(b"content-length: ", 0, head)
        if len(buffer) < head + 4 + int(buffer[mark + 16 : buffer.find(b"\r\n", mark)]):
            return
        self._buffer = b""
        told, self._told = self._told, None
        if told is not None:
            told(int(buffer[9:12]))


@dataclass
class Pool:
    """Connections, and what came back.

    Attributes:
        seen: status and seconds since the request was due, of each answer.
        lags: seconds between the time a request was due and its sending: how far this client is behind.
        unsent: requests that were due while every connection waited.
    """

    port: int
    all: list[Client] = field(default_factory=list)
    free: list[Client] = field(default_factory=list)
    seen: list[tuple[int, float]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    unsent: int = 0

    async def fill(self, connections: int) -> "Pool":
        """Open connections."""
        gc.freeze()  # or a full collection here would pass for a pause of the server
        for _ in range(connections):
            self.free.append(await self.open())
        return self

    async def open(self) -> Client:
        """One more connection, which is not free."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Client, "127.0.0.1", self.port)
        self.all.append(client)
        return client

    async def close(self) -> None:
        """Close the connections; their ends are seen by the loop before it is gone."""
        for client in self.all:
            client.abort()
        await asyncio.sleep(0.05)

    def send(self, due_s: float, request: bytes) -> None:
        """Send on a free connection what was due then."""
        client = self.free.pop()

        def answered(status: int) -> None:
            self.seen.append((status, time.perf_counter() - due_s))
            self.free.append(client)

        self.lags.append(time.perf_counter() - due_s)
        client.send(request, answered)


def arrivals(rate: float, seconds: float) -> list[float]:
    """Poisson arrivals, in seconds from the begin."""
    return list(np.cumsum(np.random.default_rng(0).exponential(1 / rate, round(rate * seconds))))


async def send_by_clock(pool: Pool, request: bytes, rate: float, seconds: float) -> None:
    """Send at a rate, whatever comes back; each answer is timed from when its request was due."""
    begin_s = time.perf_counter()
    for after_s in arrivals(rate, seconds):
        due_s = begin_s + after_s
        while (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        if pool.free:
            pool.send(due_s, request)
        else:
            pool.unsent += 1  # all connections wait: a client would have given up
            await asyncio.sleep(0)


async def answers_a_second(pool: Pool, request: bytes, in_flight: int, seconds: float) -> float:
    """With always so many requests in flight."""
    begin_s, spare = time.perf_counter(), len(pool.free) - in_flight
    while time.perf_counter() < begin_s + seconds:
        while len(pool.free) > spare:
            pool.send(time.perf_counter(), request)
        await asyncio.sleep(0.001)
    return sum(status == 200 for status, _ in pool.seen) / (time.perf_counter() - begin_s)


@dataclass
class Impatient:
    """Customers who leave when an answer takes too long, and come again.

    Attributes:
        pool: their connections.
        request: what they ask.
        patience_s: after so many seconds they close the connection.
        retries: how often they come again; at once if they left, after `patience_s` if they were refused.
        good: when an answer came in time.
        gave_up, refused, lost: tries that they left, tries that were refused, customers without an answer.
    """

    pool: Pool
    request: bytes
    patience_s: float
    retries: int
    good: list[float] = field(default_factory=list)
    gave_up: int = 0
    refused: int = 0
    lost: int = 0

    async def come(self, rate: float, seconds: float) -> None:
        """New customers at a rate; returns once the last one has gone."""
        loop, begin_s = asyncio.get_running_loop(), time.perf_counter()
        tasks = set()
        for after_s in arrivals(rate, seconds):
            if (left_s := begin_s + after_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            task = loop.create_task(self._one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self) -> None:
        for _ in range(1 + self.retries):
            client = self.pool.free.pop() if self.pool.free else await self.pool.open()
            answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            client.send(self.request, answer.set_result)
            await asyncio.wait((answer,), timeout=self.patience_s)
            if not answer.done():
                client.abort()
                self.gave_up += 1
                continue
            self.pool.free.append(client)
            if answer.result() == 200:
                self.good.append(time.perf_counter())
                return
            self.refused += 1
            await asyncio.sleep(self.patience_s)
        self.lost += 1
