"""A server that answers, and two of them that take turns."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from .place import Place
from .processes import Process, running
from .table import Peer

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Up:
    """A server that answers.

    Attributes:
        peer: what it is.
        process: of it.
        port: where it listens.
        start_s: from the start of the process to its first answer.
    """

    peer: Peer
    process: Process
    port: int
    start_s: float


@contextmanager
def up(peer: Peer, place: Place, request: bytes) -> Iterator[Up]:
    """Install, start and await a server; it is stopped at the end, whatever happens.

    Raises:
        ExperimentError: if it cannot be installed, ends, or does not answer the request in time.
    """
    process, port = place.start(peer)
    with running(process):
        yield Up(peer, process, port, process.wait_http(port, request, peer.ready_s))


def in_turn(one: Up, other: Up, load: Callable[[Up], Awaitable[T]]) -> T:
    """Load one server while the other is paused."""

    async def run() -> T:
        return await load(one)

    with other.process.paused():
        outcome = asyncio.run(run())
    one.process.check()
    return outcome
