"""How a server stands: live, ready, warm, and what it tells of its warm-up and its load."""

from collections.abc import Mapping
from typing import Any, Self

from ..jit_cache import WarmupReport
from .batching.dispatcher import Dispatcher
from .batching.loops import DeviceLoops
from .errors import Closed, Unavailable
from .hosting.model import Model
from .hosting.warming import WarmUp
from .life import Life


class Health(Life):
    """The part of a server that probes, metrics and people ask.

    Attributes:
        models: what is served, by name.
    """

    models: Mapping[str, Model]
    _dispatcher: Dispatcher
    _device: DeviceLoops
    _warmup: WarmUp

    def wait_ready(self, timeout_s: float = 900.0) -> Self:
        """Block until every model is ready.

        Raises:
            WarmupError: as soon as a bucket failed that readiness asks for, naming each and its error.
            NotReady: if the timeout passes first.
            Unavailable: if the device thread ended, or (as `Closed`) the server is not started or closed.
        """
        if self._state == "new":
            raise Closed("a server is started before it gets ready; this one is new: call start()")
        if not self._warmup.wait(lambda: self.ready and self._warmup.settled, timeout_s):
            failure = self._device.failure
            if failure is not None:
                raise Unavailable(
                    f"the device thread ended with {failure!r}: restart the server"
                ) from failure
            raise Closed(
                f"a server gets ready once, after start(); this one is {self._state}: make a new one"
            )
        return self

    def wait_over(self, timeout_s: float) -> bool:
        """Block until the warm-up has come to its end, however it went; whether it has."""
        return self._warmup.wait_over(timeout_s)

    @property
    def lost(self) -> bool:
        """Whether warm-up ended and none of the models can ever get ready."""
        return self._warmup.lost

    @property
    def live(self) -> bool:
        """Whether the process can still answer; False once the device thread ended, hangs or gave up."""
        if self._state == "new":
            return True
        lost = self._dispatcher.devices.gone
        return self._device.alive and self._device.failure is None and not lost

    @property
    def ready(self) -> bool:
        """Whether every model is ready and requests are taken."""
        able = self.live and self._dispatcher.devices.able > 0
        return self._state == "started" and able and all(model.ready for model in self.models.values())

    @property
    def warm(self) -> bool:
        """Whether every program that is to be served was made; it may be ready, and slower, before."""
        return self._warmup.finished and all(report.complete for report in self.reports.values())

    def status(self) -> dict[str, Any]:
        """State, warm-up progress and failures, for people and for the body of a 503."""
        reports = self.reports
        error = self._warmup.error or self._device.failure or self._dispatcher.devices.trouble
        return {
            "state": self._state_word(),
            "done": sum(len(report.warm) for report in reports.values()),
            "total": sum(report.total for report in reports.values()),
            "warm": self.warm,
            "cold_hits": sum(model.keeper.residency.cold_hits for model in self.models.values()),
            "failed": {
                f"{name} {bucket}": why for name, one in reports.items() for bucket, why in one.failed.items()
            },
            "error": str(error) if error else None,
        }

    def _state_word(self) -> str:
        if self._state != "started":
            return self._state
        if self.ready:
            return "ready"
        if self._dispatcher.stalled:
            return "stalled"
        if not self._dispatcher.devices.able:
            return "broken"
        lost = any(model.lost for model in self.models.values())
        return "failed" if lost or self._warmup.error or self._device.failure else "warming"

    @property
    def reports(self) -> Mapping[str, WarmupReport]:
        """Warm-up reports by model name."""
        return {name: model.report for name, model in self.models.items()}

    def load(self) -> dict[str, int]:
        """Rows, elements and input bytes that wait, rows that run."""
        waiting, running = self._dispatcher.load()
        return {
            "waiting_rows": waiting.rows,
            "waiting_elements": waiting.elements,
            "waiting_bytes": waiting.bytes,
            "running_rows": running,
        }
