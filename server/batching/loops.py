"""The device threads of a server, one for each device."""

from collections.abc import Callable, Sequence

from ..hosting.model import Model
from .batch import Batch, BatchRecord
from .clock import Clock
from .device import Crew, DeviceLoop
from .dispatcher import Dispatcher
from .faults import FaultPolicy, FaultRecord


class DeviceLoops:
    """Starts and ends them together.

    Args:
        dispatcher: where work comes from and results go; made for as many devices.
        models: by lane.
        clock: source of time.
        count: of devices.
        depth: batches in flight on each.
        on_batch: told of each batch that gave answers, in its device's thread.
        on_fault: told of each fault of a device, in its thread.
        faults: what is done about a device that fails.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: Sequence[Model],
        clock: Clock,
        count: int = 1,
        *,
        depth: int,
        on_batch: Callable[[BatchRecord], None] | None = None,
        on_fault: Callable[[FaultRecord], None] | None = None,
        faults: FaultPolicy | None = None,
    ) -> None:
        crew = Crew(count)
        self._each = [
            DeviceLoop(
                dispatcher,
                models,
                clock,
                depth=depth,
                on_batch=on_batch,
                faults=faults,
                device=index,
                crew=crew,
            )
            for index in range(count)
        ]
        for loop in self._each:
            loop.recovery.on_fault = on_fault

    @property
    def on_landed(self) -> Callable[[Batch, float, float], None] | None:
        """See `DeviceLoop`."""
        return self._each[0].on_landed

    @on_landed.setter
    def on_landed(self, told: Callable[[Batch, float, float], None] | None) -> None:
        for loop in self._each:
            loop.on_landed = told

    def start(self) -> None:
        """Begin to run."""
        for loop in self._each:
            loop.start()

    @property
    def alive(self) -> bool:
        """Whether every thread runs."""
        return all(loop.alive for loop in self._each)

    @property
    def failure(self) -> BaseException | None:
        """What ended a thread, a bug of ours."""
        return next((loop.failure for loop in self._each if loop.failure is not None), None)

    @property
    def current(self) -> bool:
        """Whether the caller is one of the threads."""
        return any(loop.current for loop in self._each)

    def join(self, timeout_s: float) -> bool:
        """Wait for their ends after the dispatcher was closed; False if one did not come in time."""
        ended = [loop.join(timeout_s) for loop in self._each]
        return all(ended)
