"""What a dispatcher does about devices that fail: leave them alone, have others take over, try them again."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import ServerError
from .clock import Clock
from .devices import Devices
from .forecast import Forecast
from .ledger import Ledger
from .request import Request, Row, State
from .sinks import deliver
from .work import Job, Rerun

MakeError = Callable[[], ServerError]


class Failover(ABC):
    """The part of a dispatcher that device threads tell of failures; its lock guards all of it."""

    _clock: Clock
    _lock: threading.Lock
    _ledger: Ledger
    _forecast: Forecast
    _jobs: deque[Job]
    _devices: Devices
    _closed: bool

    @abstractmethod
    def fail(self, rows: Sequence[Row], make_error: MakeError, device: int = 0) -> None:
        """Report that launched rows failed."""

    @abstractmethod
    def _end(self, request: Request, state: State, error: ServerError | None = None) -> None:
        """Give a request its final state; the lock is held."""

    def device_failed(self, why: str, device: int = 0) -> bool:
        """A batch, or a trial, failed for no fault of its rows; whether the device is left alone by that.

        If it was the last that was able, who waits is told, and new requests are refused until a trial works.
        """
        told: list[Request] = []
        lost: list[Rerun] = []
        with self._lock:
            opened = self._devices[device].breaker.failed(self._clock.now(), why)
            self._forecast.devices = max(1, self._devices.able)
            if opened and not self._devices.able:
                told = [one for one in self._ledger.live if one.state is State.WAITING]
                for request in told:
                    self._end(request, State.FAILED, self._devices.error())
                lost = [job for job in self._jobs if isinstance(job, Rerun)]
                for job in lost:
                    self._jobs.remove(job)
        deliver(told)
        for job in lost:
            self.fail(job.rows, self._devices.error, device)
        return opened

    def device_worked(self, device: int = 0) -> bool:
        """A batch, or a trial, came back with answers; whether that ends its being left alone."""
        breaker = self._devices[device].breaker
        if breaker.spotless:
            return False
        with self._lock:
            closed = breaker.worked()
            self._forecast.devices = max(1, self._devices.able)
            self._devices.wake()
        return closed

    def hand_over(self, job: Rerun, device: int = 0) -> bool:
        """Have another device run rows that this one failed on; False if there is none that is able."""
        with self._lock:
            others = [one for one in self._devices.each if one.able and one is not self._devices[device]]
            if self._closed or not others:
                return False
            self._jobs.append(job)
            self._devices[device].landed(self._clock.now(), job.rows)
            for one in others:
                if one.sleeps:
                    one.wake()
                    break
            return True

    def broken(self, device: int) -> bool:
        """Whether a device is left alone since it failed."""
        return self._devices[device].breaker.shut_out

    @property
    def devices(self) -> Devices:
        """All devices; to be read only."""
        return self._devices

    def drop_waiting(self, lane: int, make_error: MakeError) -> None:
        """Fail whatever waits for a model that cannot answer; what runs goes on."""
        with self._lock:
            waiting = [one for one in self._ledger.live if one.lane == lane and one.state is State.WAITING]
            for request in waiting:
                self._end(request, State.FAILED, make_error())
        deliver(waiting)

    @property
    def stalled(self) -> bool:
        """Whether every device holds work and has finished none for too long."""
        return self._devices.stalled
