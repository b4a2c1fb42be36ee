"""What time does to requests: deadlines, and the watch over a device that hangs.

Pure; time is an argument.
"""

import math
from collections.abc import Iterable

from ..errors import ConfigError, DeadlineExceeded, ServerError, Unavailable
from .deadlines import Deadlines
from .request import Request, State

Verdict = tuple[Request, State, ServerError]


class Watch:
    """Says whose time is up.

    Args:
        stall_s: a device that finishes nothing of what it holds for so long is taken for hung.
    """

    def __init__(self, stall_s: float) -> None:
        if not stall_s > 0:
            raise ConfigError(f"stall_s is above 0 seconds; got {stall_s}: give it the longest run and more")
        self.stall_s = stall_s
        self.stalled = False
        self._deadlines = Deadlines()
        self._busy_since_s = math.inf

    def add(self, request: Request) -> None:
        """Watch a request."""
        self._deadlines.add(request)

    def device_took(self, now_s: float) -> None:
        """The device thread took work."""
        self._busy_since_s = min(self._busy_since_s, now_s)

    def device_came_back(self, now_s: float, *, busy: bool) -> None:
        """The device thread finished something; `busy` if it still holds work."""
        self.stalled = False
        self._busy_since_s = now_s if busy else math.inf

    def verdicts(self, now_s: float, live: Iterable[Request]) -> list[Verdict]:
        """Requests whose time is up, each with its final state and error.

        Args:
            now_s: the time.
            live: all requests without a final state; if the device hangs, all of them fail.
        """
        late: list[Verdict] = [
            (request, State.EXPIRED, _expired(request)) for request in self._deadlines.due(now_s)
        ]
        if not self.stalled and now_s - self._busy_since_s >= self.stall_s:
            self.stalled = True
            expired = {request for request, _, _ in late}
            late += [(one, State.FAILED, self.stall_error()) for one in live if one not in expired]
        return late

    def next_s(self, now_s: float) -> float:
        """When to ask for verdicts again.

        A stall is seen between one and two times `stall_s` after its begin, so that no launch has to
        wake the timer.
        """
        return min(self._deadlines.next_s(), now_s + self.stall_s)

    def stall_error(self) -> Unavailable:
        """What those hear who wait for a device that hangs."""
        return Unavailable(
            f"the device is to finish something every {self.stall_s:g} s and has not: use another replica, "
            f"and restart this one if it stays so"
        )


def _expired(request: Request) -> DeadlineExceeded:
    allowed_s = request.deadline_s - request.arrived_s
    where = "waiting in the queue" if request.state is State.WAITING else "running"
    return DeadlineExceeded(
        f"the request was to be answered within {allowed_s:.3g} s and was still {where}: allow more time, or "
        f"retry when there is less load"
    )
