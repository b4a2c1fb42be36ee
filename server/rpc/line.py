"""In which order calls begin: all that have come are taken first, then some of them begin together.

grpc.aio asks its core for the next call once the event loop has gone round about five times, and in each
round the loop does whatever is ready. If each call began as it is taken, the next would wait for its work.
And calls that begin one by one go to the device one by one, and change threads as often.
"""

import asyncio
from collections import deque
from typing import Final

from .lag import LagGate

_TURNS: Final = 8
"""Turns of the loop without a call, after which none waits in the core: while some do, one comes in five."""

_TOGETHER: Final = 8
"""So many begin before the next look whether more have come."""

_MOST: Final = 16
"""So many are taken before some begin, even if more come without end."""

Place = tuple[int, float, "asyncio.Future[None] | None"]
"""How many were before a call, when it came, and what it waits for."""


class Line:
    """Calls that were handed over and have not begun; one for each event loop, used from that alone.

    Args:
        gate: decides who stands in it.
    """

    def __init__(self, gate: LagGate) -> None:
        self.gate = gate
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._spare = _TOGETHER  # who may begin at once
        self._turns = 0  # of the loop since the last call
        self._came = 0  # since some began
        self._looking = False

    def enter(self) -> Place | None:
        """A place in the line, for `turn`; None refuses the call."""
        self._turns = 0
        self._came += 1
        now_s = self.gate.lag.clock()
        self.gate.lag.called()
        ahead = self.gate.enter(now_s)
        if ahead is None:
            return None
        loop = asyncio.get_running_loop()
        if self._spare:
            self._spare -= 1
            self._look(loop)
            return ahead, now_s, None
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        return ahead, now_s, future

    async def turn(self, place: Place) -> None:
        """Waits until a call may begin; to be called once for each place."""
        ahead, came_s, future = place
        if future is None:
            self.gate.gone()  # it tells nothing of how long those take that wait
            return
        try:
            await future
        except asyncio.CancelledError:
            self.gate.gone()
            raise
        self.gate.begun(ahead, self.gate.lag.clock() - came_s)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sees to it that those who wait will begin."""
        if not self._spare and not self._looking:
            self._looking = True
            loop.call_soon(self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """One turn of the loop has gone by."""
        self._turns += 1
        if self._turns < _TURNS and self._came < _MOST:
            loop.call_soon(self._pass, loop)
            return
        self._turns = self._came = 0
        self._looking = False
        self._spare = _TOGETHER
        while self._spare and self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # its caller may have left
                future.set_result(None)
                self._spare -= 1
        self._look(loop)
