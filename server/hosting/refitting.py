"""Re-fits joined to models: their programs, their device thread, their traffic; also across versions."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType

from ...bucketing import Bucket, Grid
from ...jit_cache import Program, warmup_order
from ..batching.clock import Clock
from ..batching.device import Swap
from ..batching.dispatcher import Dispatcher
from ..events import REFIT
from .model import Model
from .refit import RefitPolicy, Refitter, Traffic

_PAUSE_S = 900.0


class Refitting:
    """The re-fitters of a server, one a model.

    Args:
        policy: when grids are fitted anew; None for never.
        models: whose.
        dispatcher: takes the swaps.
        clock: source of time.
        probe: times a new program on the device thread, from where on it is planned with.

    Attributes:
        by_name: the re-fitter of each model.
    """

    def __init__(
        self,
        policy: RefitPolicy | None,
        models: Sequence[Model],
        dispatcher: Dispatcher,
        clock: Clock,
        probe: Callable[[Model, Program], float],
    ) -> None:
        self._policy, self._dispatcher, self._clock, self._probe = policy, dispatcher, clock, probe
        self._lock = threading.Lock()
        self._running = False
        self._made: dict[str, Refitter] = {}
        if policy is not None:
            for model in models:
                if model.servable.layout == "packed":
                    continue  # rows are filled whatever comes: no length sits badly in them
                model.traffic = Traffic(model.servable.signature.axes, policy.half_life_s)
                self._made[model.name] = self._make(model, policy, model.traffic)
        self.by_name: Mapping[str, Refitter] = MappingProxyType(self._made)

    def start(self) -> None:
        """Begin to look."""
        with self._lock:
            self._running = True
            for one in self._made.values():
                one.start()

    def stop(self) -> None:
        """Look no more."""
        with self._lock:
            self._running = False
            for one in self._made.values():
                one.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the ends of the threads after `stop`."""
        for one in list(self._made.values()):
            one.join(timeout_s)

    def hand_over(self, old: Model, new: Model) -> None:
        """Stop re-fitting a model, so that nothing is compiled for it; the next one has its traffic and grid.

        What is under way ends first. A grid that was fitted to traffic is what the new version warms, where
        it may be as large as the old one. Call `resume` with whichever of the two goes on.
        """
        refitter = self._made.get(old.name)
        if refitter is None:
            return
        refitter.stop()
        refitter.join(_PAUSE_S)
        new.traffic = old.traffic
        if refitter.swaps and dict(new.limits) == dict(old.limits):
            new.narrow(warmup_order(old.grid))
            new.fitted = old.grid

    def resume(self, model: Model) -> None:
        """Go on with this model, in the place of the one of its name; nothing happens once stopped."""
        with self._lock:
            before = self._made.get(model.name)
            if before is None or model.traffic is None or self._policy is None:
                return
            after = self._made[model.name] = self._make(model, self._policy, model.traffic)
            after.swaps, after.failures = before.swaps, before.failures
            if self._running:
                after.start()

    def _make(self, model: Model, policy: RefitPolicy, traffic: Traffic) -> Refitter:
        def swap(grid: Grid, timeout_s: float) -> None:
            job = Swap(model, grid, Future())
            self._dispatcher.post(job)
            job.done.result(timeout_s)

        def request(bucket: Bucket) -> "Future[Program]":
            model.maker.causes[bucket] = REFIT
            return model.cache.request(bucket)

        return Refitter(
            policy,
            name=model.name,
            grid=lambda: model.grid,
            limits=model.limits,
            traffic=traffic,
            now_s=self._clock.now,
            request=request,
            probe=partial(self._probe, model),
            swap=swap,
        )
