"""Claim: a million requests with faults of every kind end exactly once each, and leave nothing behind.

Requests of one to three rows from several threads, in one process, into a model that hands its input back.
Some are poisoned (the model raises on any batch that holds them), cancelled by their caller, late before they
start, or malformed; and programs outside of the grid are asked for whose compile fails. What each caller sees
is compared with what was done to it.

    python -m servax.experiments.soak --json soak.json
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..bucketing import Bucket
from ..jit_cache.device_memory import trim_heap
from ..server import Server
from ..server.errors import BadTensor, DeadlineExceeded, ModelError, NonFiniteInput, Overloaded
from .errors import ExperimentError
from .noop import FixedDevice, noop_servable, rss_bytes
from .reporting import machine, print_table, write_json

_LENGTH = 8
_POISON = 666.0
_IN_FLIGHT = 600
_QUICK = 20_000
# With fewer requests the first caches still fill.
_ENOUGH, _MOST_GROWTH = 100_000, 0.02
KINDS = {"good": 0.94, "poison": 0.01, "cancel": 0.02, "late": 0.02, "malformed": 0.01}
# What a caller may see, by what was done to its request. A cancel or a deadline may lose the race, and a
# neighbour is never hurt.
MAY_SEE = {
    "good": {"ok"},
    "poison": {"model"},
    "cancel": {"cancelled", "ok"},
    "late": {"deadline"},
    "malformed": {"bad"},
}
Answer = Future[list[list[np.ndarray]]]


def _poisoned(inputs: Mapping[str, np.ndarray]) -> str | None:
    return "poisoned" if (inputs["x"] == _POISON).any() else None


class Books:
    """What each request saw; a second answer to one would show."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        self.wrong = 0

    def note(self, kind: str, what: str) -> None:
        """One request ended."""
        with self._lock:
            self.seen[kind, what] += 1

    def called(self) -> None:
        """One future was resolved."""
        with self._lock:
            self.calls += 1


class Caller:
    """One thread of callers.

    Args:
        server: what is asked.
        books: where answers are noted.
        seed: of its choices.
        requests: how many it sends.
    """

    def __init__(self, server: Server, books: Books, seed: int, requests: int) -> None:
        self._model, self._books = server.model(), books
        self._random = np.random.default_rng(seed)
        self._requests = requests
        self._flying: deque[tuple[str, float, Answer]] = deque()

    def run(self) -> None:
        """Send all, keeping some in flight."""
        names = list(KINDS)
        kinds = self._random.choice(len(names), self._requests, p=list(KINDS.values()))
        for number, kind in enumerate(kinds.tolist()):
            self._send(names[kind], float(number % 600))
            if len(self._flying) >= _IN_FLIGHT:
                self._collect(_IN_FLIGHT // 2)
        self._collect(len(self._flying))

    def _send(self, kind: str, value: float) -> None:
        rows: list[Mapping[str, Any]] = [{"x": np.full(_LENGTH, value, np.float32)}] * (1 + int(value) % 3)
        if kind == "poison":
            rows = [*rows[1:], {"x": np.full(_LENGTH, _POISON, np.float32)}]
        if kind == "malformed":
            bad = np.full(_LENGTH, np.nan, np.float32) if value % 2 else np.zeros(_LENGTH + 1, np.float32)
            rows = [{"x": bad}]
        while True:
            try:
                future = self._model.run_threaded(rows, timeout_s=1e-6 if kind == "late" else None)
            except (BadTensor, NonFiniteInput):
                self._books.note(kind, "bad")
                return
            except Overloaded:
                self._collect(max(1, len(self._flying) // 2))
                continue
            break
        future.add_done_callback(lambda _: self._books.called())
        if kind == "cancel":
            future.cancel()
        self._flying.append((kind, value, future))

    def _collect(self, count: int) -> None:
        for _ in range(min(count, len(self._flying))):
            kind, value, future = self._flying.popleft()
            self._books.note(kind, self._outcome(value, future))

    def _outcome(self, value: float, future: Answer) -> str:
        try:
            rows = future.result(timeout=60)
        except CancelledError:
            return "cancelled"
        except ModelError:
            return "model"
        except DeadlineExceeded:
            return "deadline"
        if any(row[0][0] != value for row in rows) or len(rows) != 1 + int(value) % 3:
            self._books.wrong += 1
        return "ok"


def _fail_compiles(server: Server, device: FixedDevice, stop: threading.Event) -> int:
    """Ask for programs that cannot be made, until told to stop; how many failed as they must."""
    failed = 0
    while not stop.wait(0.05):
        device.refuse_compiles.set()
        future = server.model().cache.request(Bucket(("batch",), (1000 + failed,)))
        failed += future.exception(timeout=60) is not None
    return failed


def soak(requests: int, threads: int = 3, seed: int = 0) -> dict[str, Any]:
    """Send so many requests and check every answer.

    Raises:
        ExperimentError: if a request saw what it must not see, or something is left behind.
    """
    books, stop = Books(), threading.Event()
    device = FixedDevice(fails=_poisoned)
    memory: list[int] = []
    served = Server(noop_servable(32, _LENGTH), compile_program=device.compile)
    with served as server, ThreadPoolExecutor(threads) as pool:
        failed: list[int] = []
        compiles = threading.Thread(target=lambda: failed.append(_fail_compiles(server, device, stop)))
        compiles.start()
        share = requests // threads
        begin_s = time.perf_counter()
        for part in range(10):  # memory is read between parts, at rest
            callers = [Caller(server, books, seed + 100 * part + n, share // 10) for n in range(threads)]
            list(pool.map(Caller.run, callers))
            del callers
            trim_heap()  # what is free counts for nothing
            memory.append(rss_bytes())
        seconds = time.perf_counter() - begin_s
        stop.set()
        compiles.join()
        until_s = time.perf_counter() + 10  # a cancelled request's batch may still be on the device
        while any(server.load().values()) and time.perf_counter() < until_s:
            time.sleep(0.01)
        left, live = server.load(), server.live
    return _checked(books, share // 10 * 10 * threads, memory, left, live, failed[0]) | {
        "seconds": seconds,
        "rps": sum(books.seen.values()) / seconds,
        "runs": device.runs,
    }


def _checked(
    books: Books, requests: int, memory: list[int], left: dict[str, int], live: bool, failed: int
) -> dict[str, Any]:
    ended = sum(books.seen.values())
    strange = {pair: count for pair, count in books.seen.items() if pair[1] not in MAY_SEE[pair[0]]}
    futures = ended - sum(count for (_, what), count in books.seen.items() if what == "bad")
    growth = memory[-1] / memory[1] - 1
    if ended != requests or strange or books.wrong or any(left.values()) or not live:
        raise ExperimentError(
            f"Each of {requests} requests ends once and as it must; {ended} ended, {strange} strangely, "
            f"{books.wrong} with wrong values, {left} left, live is {live}."
        )
    if books.calls != futures:
        raise ExperimentError(f"{futures} futures are resolved once each; {books.calls} calls came.")
    if requests >= _ENOUGH and growth > _MOST_GROWTH:
        raise ExperimentError(f"Memory must stay flat; it grew by {growth:.1%} from the second tenth on.")
    return {
        "requests": requests,
        "outcomes": {f"{kind}: {what}": count for (kind, what), count in sorted(books.seen.items())},
        "failed_compiles": failed,
        "memory_growth": growth,
        "memory_mb": [round(one / 1e6, 1) for one in memory],
        "left": left,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    requests: Annotated[int, typer.Option(min=1000, help="How many.")] = 1_000_000,
    threads: Annotated[int, typer.Option(min=1, help="That send them.")] = 3,
    seed: Annotated[int, typer.Option(help="Of all choices.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {_QUICK} requests.")] = False,
) -> None:
    """Send requests with faults of every kind and check that each ends once."""
    found = soak(_QUICK if quick else requests, threads, seed)
    rows = [{"what": key, "count": count} for key, count in found["outcomes"].items()]
    note = (
        f"{found['requests']} requests in {found['seconds']:.0f} s, {found['failed_compiles']} failed "
        f"compiles, memory grew by {found['memory_growth']:.1%} from the second tenth to the last"
    )
    print_table("Soak", {"what": "done: seen", "count": "requests|,"}, rows, note)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **found})


if __name__ == "__main__":
    typer.run(main)
