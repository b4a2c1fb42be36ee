"""Load on a server over HTTP/1.1: clients that wait for their answers, and clients that send by the clock."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ANSWER_S = 60.0
_CONNECTIONS = 256


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a series of requests.

    Attributes:
        seconds: `(requests,)` float64, from when each was due to its answer; infinite without one.
        wall_s: from the first request to the last answer.
        statuses: how often each status came; 0 stands for a broken connection or an answer too late.
    """

    seconds: NDArray[np.float64]
    wall_s: float
    statuses: dict[int, int]

    @property
    def answered(self) -> int:
        """Requests that got 200."""
        return int(np.isfinite(self.seconds).sum())

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answered / self.wall_s

    def percentile_ms(self, percent: float) -> float:
        """The latency that so many percent of all requests kept; infinite if too few were answered."""
        return float(np.percentile(self.seconds, percent, method="inverted_cdf")) * 1e3


class Connection:
    """One connection, opened anew when the server closed it; one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body; status 0 if the connection broke or the answer came too late."""
        kept = self._streams is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                try:
                    return await self._once(request)
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    # A server may close a connection that was idle for long just when it is used again.
                    if not kept or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                        raise
                    self.close()
                    return await self._once(request)
        except (OSError, EOFError, TimeoutError, ValueError):
            self.close()
            return 0, b""

    async def _once(self, request: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        self._streams[1].write(request)
        status, body, keep = await _answer(self._streams[0])
        if not keep:
            self.close()
        return status, body

    def close(self) -> None:
        """Close it; a later request opens it again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    lines = head.split(b"\r\n")
    fields = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
    status, keep = int(lines[0].split(b" ")[1]), fields.get(b"connection", b"").strip() != b"close"
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readuntil(b"\r\n")
        return status, b"".join(parts), keep
    return status, await reader.readexactly(int(fields.get(b"content-length", b"0"))), keep


@asynccontextmanager
async def _connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    made = [Connection(port) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()
        await asyncio.sleep(0)  # the loop sees their ends before it is gone


async def closed_loop(port: int, requests: Sequence[bytes], clients: int) -> Outcome:
    """So many clients, each of which sends its next request when the last was answered."""
    seconds = np.full(len(requests), np.inf)
    statuses: dict[int, int] = {}
    places = iter(range(len(requests)))

    async def client(connection: Connection) -> None:
        for place in places:
            begin_s = time.perf_counter()
            status, _ = await connection.ask(requests[place])
            statuses[status] = statuses.get(status, 0) + 1
            if status == 200:
                seconds[place] = time.perf_counter() - begin_s

    async with _connections(port, clients) as connections:
        begin_s = time.perf_counter()
        await asyncio.gather(*map(client, connections))
        return Outcome(seconds, time.perf_counter() - begin_s, statuses)


async def open_loop(port: int, requests: Sequence[bytes], due_s: NDArray[np.float64]) -> Outcome:
    """Each request is sent when it is due, whatever came back, and timed from then.

    Args:
        port: of the server.
        requests: what to send.
        due_s: rising seconds from the start, one a request.
    """
    seconds = np.full(len(requests), np.inf)
    statuses: dict[int, int] = {}
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()

    async def one(place: int, at_s: float) -> None:
        connection = await free.get()
        status, _ = await connection.ask(requests[place])
        free.put_nowait(connection)
        statuses[status] = statuses.get(status, 0) + 1
        if status == 200:
            seconds[place] = time.perf_counter() - at_s

    async with _connections(port, _CONNECTIONS) as connections:
        for connection in connections:
            free.put_nowait(connection)
        begin_s, tasks = time.perf_counter(), []
        for place, at_s in enumerate((begin_s + due_s).tolist()):
            if (left_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            tasks.append(asyncio.create_task(one(place, at_s)))
        await asyncio.gather(*tasks)
        return Outcome(seconds, time.perf_counter() - begin_s, statuses)
