"""How long calls wait before gRPC hands them over, asked by calls of our own.

Calls that come faster than they are taken wait in gRPC's core, and before it in sockets, where nobody sees
how many they are. The time that is left to them tells nothing either, since what their callers allowed is not
handed over. A call to ourselves waits where they do.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import grpc

from ..http.gate import Gate
from . import leftovers

SERVICE: Final = "servax.Lag"
_METHOD: Final = f"/{SERVICE}/Ask"
# One call to ourselves costs about 150 us of the processor: 1.5 % at so many, and none while nobody calls.
_EVERY_S: Final = 0.01
_LONGEST_S: Final = 1.0
# While calls come we ask more often than that; what was true before they came tells nothing.
_FRESH_S: Final = 0.1
# A wait that is over counts half: it is known, and a gate keeps something back for what it can only predict.
# In full, a tenth was refused just below saturation that would have been in time (`experiments.load`).
_PAST: Final = 0.5
_log = logging.getLogger("servax.grpc")


class Lag:
    """Asks while calls come; one for each server, used from its event loop alone.

    Args:
        clock: monotonic seconds.

    Attributes:
        longest_s: how long one may wait before it is given up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.longest_s = _LONGEST_S
        self._token = secrets.token_hex(8)
        self._wanted = asyncio.Event()
        self._sent_s: float | None = None
        self._last_s = 0.0
        self._last_at_s = -math.inf

    @property
    def seconds(self) -> float:
        """How long the last one waited, or the one that waits now has waited, if that is longer."""
        now_s = self.clock()
        last_s = self._last_s if now_s < self._last_at_s + _FRESH_S else 0.0
        return last_s if self._sent_s is None else max(last_s, now_s - self._sent_s)

    def called(self) -> None:
        """Somebody called, so it is worth asking."""
        self._wanted.set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The method that is called."""
        method = grpc.stream_unary_rpc_method_handler(self._handed_over)
        return grpc.method_handlers_generic_handler(SERVICE, {"Ask": method})

    async def _handed_over(self, requests: Any, context: Any) -> bytes:
        if ("servax-token", self._token) in tuple(context.invocation_metadata() or ()):
            self._arrived()
        return b""

    def _arrived(self) -> None:
        if self._sent_s is not None:
            self._last_at_s = self.clock()
            self._last_s, self._sent_s = self._last_at_s - self._sent_s, None

    async def run(self, ask: Callable[[tuple[tuple[str, str], ...]], Any]) -> None:
        """Asks until it is cancelled.

        Args:
            ask: calls ourselves with these metadata.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._token = secrets.token_hex(8)  # one that was given up may be handed over all the same, later
            self._sent_s = self.clock()
            try:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it waited too long, or there was no place
                    await ask((("servax-token", self._token),))
            finally:
                self._arrived()
            await asyncio.sleep(_EVERY_S)


@contextlib.contextmanager
def own_door(server: grpc.aio.Server) -> Iterator[str | None]:
    """A socket of the file system that only our user can open, for calls to ourselves; before the start.

    Yields:
        Its address for gRPC; None where there are no such sockets.
    """
    with contextlib.ExitStack() as stack:
        address = None
        try:
            if sys.platform != "win32":
                leftovers.clear(tempfile.gettempdir())
                made = tempfile.TemporaryDirectory(
                    prefix=leftovers.folder_prefix(), ignore_cleanup_errors=True
                )
                address = f"unix:{stack.enter_context(made)}/{leftovers.SOCKET}"
                server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:  # a file system that is read only, a path that is too long
            _log.warning("nothing tells how long gRPC calls wait, for want of a socket: %s", error)
            address = None
        yield address


@contextlib.asynccontextmanager
async def asking(lag: Lag, address: str | None) -> AsyncIterator[None]:
    """Asks while the block lasts, at that address of the server."""
    if address is None:
        yield
        return
    never_idle = [("grpc.client_idle_timeout_ms", 2**31 - 1)]
    async with grpc.aio.insecure_channel(address, options=never_idle) as channel:
        channel.get_state(try_to_connect=True)  # else the first would wait for the connection
        call = channel.unary_unary(_METHOD)
        task = asyncio.create_task(lag.run(lambda given: call(b"", metadata=given, timeout=lag.longest_s)))
        task.add_done_callback(_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("nothing tells any more how long gRPC calls wait", exc_info=task.exception())


class LagGate(Gate):
    """A gate that knows how long those who come have waited already.

    Args:
        lag: tells it.
        most_lag_s, count: as of the gate.
    """

    def __init__(self, lag: Lag, most_lag_s: float, count: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(most_lag_s, count)
        self.lag = lag
        # One that is given up sooner would never tell of a wait that shuts the gate.
        lag.longest_s = max(lag.longest_s, 2 * most_lag_s / _PAST)

    @property
    def lag_s(self) -> float:
        """Seconds that a newcomer will wait, and a part of those that it has waited."""
        return _PAST * self.lag.seconds + super().lag_s
