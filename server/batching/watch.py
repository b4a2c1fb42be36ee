"""What time does to requests and devices. Pure; time is an argument."""

import math

from ..errors import ConfigError, DeadlineExceeded, Unavailable
from .request import Request, State


class Stall:
    """Says whether a device hangs.

    Args:
        stall_s: a device that finishes nothing of what it holds for so long is taken for hung.

    Attributes:
        stalled: whether it hangs, as was found when it was last looked at.
    """

    def __init__(self, stall_s: float) -> None:
        if not stall_s > 0:
            raise ConfigError(f"stall_s is above 0 seconds; got {stall_s}: give it the longest run and more")
        self.stall_s = stall_s
        self.stalled = False
        self._busy_since_s = math.inf

    def device_took(self, now_s: float) -> None:
        """The device thread took work."""
        self._busy_since_s = min(self._busy_since_s, now_s)

    def device_came_back(self, now_s: float, *, busy: bool) -> None:
        """The device thread finished something; `busy` if it still holds work."""
        self.stalled = False
        self._busy_since_s = now_s if busy else math.inf

    def found(self, now_s: float) -> bool:
        """Look at it; True if it hangs and did not at the last look.

        Looked at every `stall_s`, a stall is seen between one and two times that after its begin, and no
        launch has to wake a timer.
        """
        before = self.stalled
        self.stalled = before or now_s - self._busy_since_s >= self.stall_s
        return self.stalled and not before

    def error(self) -> Unavailable:
        """What those hear who wait for a device that hangs."""
        return Unavailable(
            f"the device is to finish something every {self.stall_s:g} s and has not: use another replica, "
            f"and restart this one if it stays so"
        )


def expired(request: Request) -> DeadlineExceeded:
    """What the caller of a request hears whose time is up."""
    allowed_s = request.deadline_s - request.arrived_s
    where = "waiting in the queue" if request.state is State.WAITING else "running"
    return DeadlineExceeded(
        f"the request was to be answered within {allowed_s:.3g} s and was still {where}: allow more time, or "
        f"retry when there is less load"
    )
