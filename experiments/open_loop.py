"""Open-loop load: requests leave when they are due, whatever has come back, and are timed from then.

A closed loop of clients that wait for their answers asks less of a server the slower it is, and leaves out
just the latencies that its users would see ("coordinated omission", Gil Tene). Here a request that is due
while no connection is free counts from then.
"""

import asyncio
import gc
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from .errors import ExperimentError
from .grpc_load import GrpcCaller
from .http_load import Client

MOST_CONNECTIONS = 1000
# This client is not the one under test: beyond so much lag its figures say little of the server.
LAG_S = 0.02


def poisson(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Arrivals of a Poisson process in `[0, seconds)`, rising seconds."""
    count = round(rate * seconds * 1.5 + 20)
    found = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return found[found < seconds]


@dataclass
class Outcome:
    """What came back of one load.

    Attributes:
        seconds: how long requests were sent.
        sent: how many were due.
        ok_s: seconds from due to answer, of each answer with 200.
        refused: answers with 429 or 503.
        expired: answers with 504.
        failed: other answers, and broken connections.
        lags_s: seconds that this client was late itself, for want of processor time.
        sent_s: seconds from when a request was due until it was written to a connection: these lags, and the
            wait for a connection where all wait for their answers.
        refused_s: seconds from when a request was written until it was refused.
    """

    seconds: float
    sent: int = 0
    ok_s: list[float] = field(default_factory=list)
    refused: int = 0
    expired: int = 0
    failed: int = 0
    lags_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Requests without an answer yet."""
        return self.sent - len(self.ok_s) - self.refused - self.expired - self.failed

    def note(self, status: int, seconds: float, waited_s: float = 0.0) -> None:
        """One answer, so long after it was due; status 0 for a connection that broke.

        Args:
            status: of HTTP.
            seconds: since the request was due.
            waited_s: for how many of them it was not written yet.
        """
        self.sent_s.append(waited_s)
        if status == 200:
            self.ok_s.append(seconds)
        elif status in (429, 503):
            self.refused += 1
            self.refused_s.append(seconds - waited_s)
        elif status == 504:
            self.expired += 1
        else:
            self.failed += 1

    def summary(self, slo_s: float) -> dict[str, Any]:
        """Rates a second and latencies in milliseconds; None where nothing was answered."""
        good = np.array(self.ok_s)
        shares = {"p50_ms": 50.0, "p90_ms": 90.0, "p99_ms": 99.0, "p99_9_ms": 99.9}
        lag_s, sent_s, refused_s = (
            float(np.percentile(seen, 99)) if seen else None
            for seen in (self.lags_s, self.sent_s, self.refused_s)
        )
        return {
            "offered_rps": self.sent / self.seconds,
            "answered_rps": len(good) / self.seconds,
            "goodput_rps": float((good <= slo_s).sum()) / self.seconds,
            "refused": self.refused,
            "expired": self.expired,
            "failed": self.failed,
            "unanswered": self.open,
            **{key: float(np.percentile(good, q)) * 1e3 if len(good) else None for key, q in shares.items()},
            "refusal_p99_ms": None if refused_s is None else refused_s * 1e3,
            "client_lag_p99_ms": None if lag_s is None else lag_s * 1e3,
            "client_wait_p99_ms": None if sent_s is None else sent_s * 1e3,
            "client_kept_up": sent_s is not None and sent_s < LAG_S,
        }


class _Caller(Client):
    """A connection that tells when it breaks."""

    ended = False
    at_once = 1  # requests

    def connection_lost(self, exc: Exception | None) -> None:
        """What was asked last is not answered any more."""
        self.ended = True
        told, self._told = self._told, None
        if told is not None:
            told(0)


class Sender:
    """Sends to one server, over as many connections as are needed at once.

    Args:
        url: of the server, `http://host:port`, `https://host:port` or `grpc://host:port`.
        most: requests at once at most, each on a connection of its own, but for gRPC; what is due beyond
            waits here, and its time counts.
    """

    def __init__(self, url: str, most: int = MOST_CONNECTIONS) -> None:
        split = urlsplit(url)
        if split.scheme not in ("http", "https", "grpc") or not split.hostname:
            raise ExperimentError(f"A server is named by its URL, http://host:port; got {url!r}.")
        self._kind: type[_Caller] | type[GrpcCaller] = GrpcCaller if split.scheme == "grpc" else _Caller
        self._host, self._port = split.hostname, split.port or (443 if split.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if split.scheme == "https" else None
        self._most = max(1, most // self._kind.at_once)
        self._free: list[_Caller | GrpcCaller] = []
        self._all: set[_Caller | GrpcCaller] = set()
        self._opening = 0
        self._due: deque[tuple[float, bytes]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcome = Outcome(1.0)

    async def run(
        self, requests: Sequence[bytes], arrivals_s: np.ndarray, seconds: float, grace_s: float
    ) -> Outcome:
        """Send each request at its time; wait `grace_s` at most for the last answers.

        Args:
            requests: whole ones of HTTP, or calls of gRPC; repeated where there are fewer than arrivals.
            arrivals_s: rising seconds from now.
            seconds: over which rates are told.
            grace_s: what is not answered so long after the end counts as unanswered.
        """
        outcome = self.outcome = Outcome(seconds)
        gc.collect()
        gc.freeze()  # or a full collection here would pass for a pause of the server
        begin_s = time.perf_counter()
        for place, after_s in enumerate(arrivals_s.tolist()):
            due_s = begin_s + after_s
            while (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            self.offer(due_s, requests[place % len(requests)])
            if outcome.sent % 16 == 0:
                await asyncio.sleep(0)  # behind the clock answers must be read all the same
        until_s = time.perf_counter() + grace_s
        while outcome.open and time.perf_counter() < until_s:
            await asyncio.sleep(0.01)
        self.outcome = Outcome(1.0)  # what comes later is nobody's
        self._due.clear()
        return outcome

    def offer(self, due_s: float, request: bytes) -> None:
        """Send what is due, as soon as a connection is free."""
        self.outcome.sent += 1
        self.outcome.lags_s.append(time.perf_counter() - due_s)
        self._due.append((due_s, request))
        self._send()

    def _send(self) -> None:
        while self._due and self._free:
            caller = self._free.pop()
            if not caller.ended:
                self._ask(caller, *self._due.popleft())
        if len(self._due) > self._opening and len(self._all) + self._opening < self._most:
            self._opening += 1
            task = asyncio.ensure_future(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ask(self, caller: _Caller | GrpcCaller, due_s: float, request: bytes) -> None:
        outcome = self.outcome
        waited_s = time.perf_counter() - due_s

        def told(status: int) -> None:
            outcome.note(status, time.perf_counter() - due_s, waited_s)
            (self._all.discard if caller.ended else self._free.append)(caller)
            self._send()

        caller.send(request, told)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            caller = self._kind()
            await loop.create_connection(lambda: caller, self._host, self._port, ssl=self._tls)
        except OSError:
            if self._due:
                self._due.popleft()
                self.outcome.note(0, 0.0)
        else:
            self._all.add(caller)
            self._free.extend([caller] * caller.at_once)
        finally:
            self._opening -= 1
        self._send()

    async def close(self) -> None:
        """Close the connections; their ends are seen by the loop before it is gone."""
        self._due.clear()
        await asyncio.gather(*self._tasks)
        for caller in self._all:
            caller.abort()
        await asyncio.sleep(0.05)


async def saturated(sender: Sender, requests: Sequence[bytes], in_flight: int, seconds: float) -> float:
    """Answers a second with always so many in flight: about what the server can do."""
    outcome = sender.outcome = Outcome(seconds)
    begin_s, place = time.perf_counter(), 0
    while (now_s := time.perf_counter()) < begin_s + seconds:
        for _ in range(in_flight - outcome.open):
            sender.offer(now_s, requests[place % len(requests)])
            place += 1
        await asyncio.sleep(0.001)
    taken_s = time.perf_counter() - begin_s
    if not outcome.ok_s:
        raise ExperimentError(
            f"A server must answer; got {outcome.refused} refusals, {outcome.failed} failures."
        )
    return len(outcome.ok_s) / taken_s
