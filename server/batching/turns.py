"""Whose turn it is when several models share a device: start-time fair queueing.

After Goyal, Vin and Cheng, "Start-time fair queuing" (SIGCOMM 1996), with equal weights. Each launch moves
its lane's tag on by its predicted seconds, and the lane with the smallest tag goes first. So under load
every lane gets the same share of device time, and one that was idle goes next but saves up no credit.
"""

from collections.abc import Sequence

_ALONE = (0,)


class Turns:
    """The order of lanes; pure bookkeeping."""

    def __init__(self) -> None:
        self._tags: list[float] = []
        self._now_s = 0.0

    def add(self) -> int:
        """One more lane; returns its index."""
        self._tags.append(0.0)
        return len(self._tags) - 1

    def order(self) -> Sequence[int]:
        """Lanes, the one to ask first in front."""
        if len(self._tags) == 1:
            return _ALONE
        return sorted(range(len(self._tags)), key=lambda lane: (self._start(lane), self._tags[lane]))

    def charge(self, lane: int, seconds: float) -> None:
        """A launch of a lane that will take so many seconds of the device."""
        self._now_s = self._start(lane)
        self._tags[lane] = self._now_s + seconds

    def _start(self, lane: int) -> float:
        return max(self._tags[lane], self._now_s)
