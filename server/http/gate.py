"""Which requests the event loop can still begin in time: those beyond are refused unread.

Reading, refusing and answering all take the event loop. Where that is what is short, a request that is parsed
only to hear that it comes too late costs as much as one that is served, and all grow old before they are
read. So the decision comes before the body is looked at, from what costs nothing to know: how many requests
are read and not begun, how long each of those lately took to begin for each that was before it, and how many
of those that began were refused all the same. Pure; time is an argument.
"""

import math
from collections.abc import Callable
from typing import Final

from ..errors import Overloaded

# A sample counts for a tenth, and no single pause of the process, which all that were read before it share,
# for more than three of the usual.
_WEIGHT = 0.1
_MOST_RATIO = 3.0
_FIRST_S = 1e-4
# Of the time that callers allow, so much may pass before their requests begin.
_SHARE = 0.2
_LEAST_S = 0.005
# Where requests begin after a twentieth of the bound the loop is getting busy, at twice that it is.
_BUSY = 0.05
# Then a tenth more begin than are not refused after, so that more do as soon as more can.
_MORE = 1.1
_MEMORY_S = 0.3

_RETRY_AFTER_S = 1.0

CAME: Final = "servax.came"
"""Key of an ASGI scope: when its head was read, and how many requests had to begin before it."""


class Gate:
    """Lets requests in while they will begin in time; one for each event loop.

    In time is a fifth of what callers allowed lately, and `most_lag_s` where they allow more or say nothing.
    While the loop is busy, of what would be refused further in for want of room as many are refused here as
    can be told: a part of all newcomers, as in client-side throttling ("Handling Overload" in Site
    Reliability Engineering, Google, 2016).

    Args:
        most_lag_s: a request that would wait longer to begin is refused, whatever its caller allows.
        count: told how many were refused, once for each turn of the loop that refused any.

    Attributes:
        ahead: requests that were let in and have not begun.
        bound_s: seconds within which a request has to begin.
    """

    def __init__(self, most_lag_s: float, count: Callable[[int], None] = lambda _: None) -> None:
        self.ahead = 0
        self.bound_s = most_lag_s
        self._count = count
        self._most_lag_s = most_lag_s
        self._hurry = _SHARE / most_lag_s  # of callers: one over the seconds that they allow, lately
        self._pace_s = _FIRST_S
        self._lately_s = 0.0  # in which requests began
        self._most_pace_s, self._most_lately_s = _MOST_RATIO * _FIRST_S, _BUSY * most_lag_s
        self._came = self._in = 0.0
        self._credit = 1.0
        self._now_s = -math.inf
        self._unread = 0

    @property
    def lag_s(self) -> float:
        """Seconds in which a newcomer would begin; 0 if nobody is before it, whatever was measured."""
        return self.ahead * self._pace_s

    def enter(self, now_s: float) -> int | None:
        """Lets a request in and tells how many are before it; None refuses it."""
        self._forget(now_s)
        self._came += 1
        ahead = self.ahead
        if not ahead:  # whatever delays those that are read with this one delays them together
            self._most_pace_s = _MOST_RATIO * self._pace_s
            self._most_lately_s = max(_MOST_RATIO * self._lately_s, _BUSY * self.bound_s)
        if self.lag_s > self.bound_s or self._in_vain():
            return None
        self.ahead = ahead + 1
        self._in += 1
        return ahead

    def _in_vain(self) -> bool:
        """Whether this one belongs to the part that would be refused further in; none while idle."""
        share = max(_MORE * (self._in + 1) / self._came, 2.0 - self._lately_s / (_BUSY * self.bound_s))
        self._credit = min(self._credit + share, 1.0 + _MORE)
        if self._credit < 1:
            return True
        self._credit -= 1
        return False

    def _forget(self, now_s: float) -> None:
        if now_s > self._now_s + _MEMORY_S / 32:
            kept = math.exp((self._now_s - now_s) / _MEMORY_S)
            self._came, self._in, self._now_s = self._came * kept, self._in * kept, now_s
            self._lately_s *= kept

    def begun(self, ahead: int, lag_s: float, waited_s: float | None = None) -> None:
        """A request that was let in begins.

        Args:
            ahead: what `enter` told.
            lag_s: seconds in which it and those before it were dealt with.
            waited_s: how many of them it waited itself; None for all.
        """
        self.ahead -= 1
        waited_s = min(lag_s if waited_s is None else waited_s, self.bound_s, self._most_lately_s)
        self._lately_s += _WEIGHT * (waited_s - self._lately_s)
        pace_s = min(lag_s / (ahead + 1), self._most_pace_s)
        self._pace_s += _WEIGHT * (pace_s - self._pace_s)

    def gone(self) -> None:
        """A request that was let in will never begin."""
        self.ahead -= 1

    def allowed(self, timeout_s: float | None, *, refused: bool = False) -> None:
        """What became known of a request that began.

        Args:
            timeout_s: seconds that its caller allows; None for no bound.
            refused: whether there was no room for it, or no time.
        """
        if refused:
            self._in = max(self._in - 1, 0.0)
        share_s = self._most_lag_s if timeout_s is None else _SHARE * timeout_s
        hurry = _SHARE / min(max(share_s, _LEAST_S), self._most_lag_s)
        self._hurry += _WEIGHT * (hurry - self._hurry)
        self.bound_s = _SHARE / self._hurry

    def refused(self) -> bool:
        """Counts one that was refused here; True for the first since `flush`, which is to be called soon."""
        self._unread += 1
        return self._unread == 1

    def flush(self) -> None:
        """Tells of those that were refused since."""
        count, self._unread = self._unread, 0
        if count:
            self._count(count)


def late(gate: Gate) -> Overloaded:
    """What those hear who are refused."""
    return Overloaded(
        f"A request must begin within {gate.bound_s:.3g} s, got {gate.ahead} before it that take "
        f"{gate.lag_s:.3g} s, or no room for it later; retry after {_RETRY_AFTER_S:g} s, or add a server.",
        _RETRY_AFTER_S,
        "lag",
    )
