"""The devices of a server: which of them sleep, hang or are broken, and what each holds.

The dispatcher's lock guards it.
"""

import threading
from collections.abc import Sequence

from ..errors import ServerError
from .breaker import Breaker, Circuit
from .faults import FaultPolicy
from .request import Request, Row
from .watch import Stall


class Device:
    """One device, or one set of devices that run a program together, and its thread.

    Attributes:
        stall: whether it hangs.
        breaker: whether it fails.
        cond: what its thread sleeps on.
        sleeps: whether it does.
        holds: rows that were launched on it and have not landed.
        did_job: whether it took a job last, no rows.
    """

    def __init__(self, stall_s: float, policy: FaultPolicy, lock: threading.Lock) -> None:
        self.stall = Stall(stall_s)
        self.breaker = Breaker(policy)
        self.cond = threading.Condition(lock)
        self.sleeps = False
        self.holds: set[Row] = set()
        self.did_job = False

    @property
    def able(self) -> bool:
        """Whether it is expected to answer."""
        return not self.stall.stalled and not self.breaker.shut_out

    def took(self, now_s: float, rows: Sequence[Row]) -> None:
        """Its thread took work."""
        self.stall.device_took(now_s)
        self.holds.update(rows)
        self.did_job = not rows

    def landed(self, now_s: float, rows: Sequence[Row]) -> bool:
        """Its thread finished something, or gave it away; whether it was taken for hung until now."""
        hung = self.stall.stalled
        self.holds.difference_update(rows)
        self.stall.device_came_back(now_s, busy=bool(self.holds))
        return hung

    def wake(self) -> None:
        """Wake its thread."""
        self.sleeps = False  # one notification is enough
        self.cond.notify()


class Devices:
    """All of them, by index."""

    def __init__(self, count: int, stall_s: float, policy: FaultPolicy, lock: threading.Lock) -> None:
        self.each = [Device(stall_s, policy, lock) for _ in range(count)]

    def __getitem__(self, index: int) -> Device:
        return self.each[index]

    @property
    def able(self) -> int:
        """How many of them are expected to answer."""
        return sum([one.able for one in self.each])

    def others_free(self, index: int) -> bool:
        """Whether a device beside this one could take work at once; a moment's look, without the lock."""
        return any(not one.holds and one.able for place, one in enumerate(self.each) if place != index)

    def none_able(self) -> bool:
        """Whether no device is."""
        for one in self.each:  # noqa: SIM110 (asked at every request; a generator costs as much again)
            if not one.stall.stalled and one.breaker.circuit is Circuit.CLOSED:
                return False
        return True

    @property
    def stalled(self) -> bool:
        """Whether all hang."""
        return all(one.stall.stalled for one in self.each)

    @property
    def gone(self) -> bool:
        """Whether none can answer and none is expected to."""
        return all(one.breaker.gone or one.stall.stalled for one in self.each)

    @property
    def trouble(self) -> str:
        """What is wrong with those that are not able; "" if all are."""
        errors = [
            str(_error(one)) if len(self.each) == 1 else f"device {index}: {_error(one)}"
            for index, one in enumerate(self.each)
            if not one.able
        ]
        return "; ".join(errors)

    def error(self) -> ServerError:
        """What those hear who come while none is able: of the device that gives most hope."""
        return _error(min(self.each, key=lambda one: (one.breaker.gone, one.stall.stalled)))

    def wake(self, *, unable_too: bool = False) -> None:
        """Wake one that sleeps, if any does."""
        for one in self.each:
            if one.sleeps and (one.able or unable_too):
                one.wake()
                return

    def hung(self, now_s: float, live: set[Request]) -> set[Request]:
        """Requests that a device holds which was just found to hang; of the last able one, all."""
        found = [one for one in self.each if one.stall.found(now_s)]
        if found and not self.able:
            return set(live)
        return {row.request for one in found for row in one.holds if not row.request.over}


def _error(device: Device) -> ServerError:
    return device.stall.error() if device.stall.stalled else device.breaker.error()
