"""The server as Python sees it: start, warm up, answer, drain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import jax

from ..jit_cache import CompileService, Servable, StoredPrograms
from ..jit_cache.replicas import Replicas, devices_each
from ..jit_cache.store import Store
from .batching.admission import QueueLimits, check_window
from .batching.batch import BatchRecord
from .batching.batcher import Policy
from .batching.clock import Clock, MonotonicClock
from .batching.dispatcher import Dispatcher
from .batching.faults import FaultPolicy, FaultRecord
from .batching.loops import DeviceLoops
from .batching.request import DEFAULT_PRIORITY
from .batching.shares import written_weights
from .batching.sinks import Sinks
from .errors import ConfigError, UnknownModel
from .health import Health
from .hosting.calls import read_call
from .hosting.mapping import map_items
from .hosting.model import Model
from .hosting.programs import Programs
from .hosting.refit import RefitPolicy, Refitter
from .hosting.refitting import Refitting
from .hosting.shared import Compile, Shared
from .hosting.versions import Versions, check_servables
from .hosting.warming import OnProgress, WarmUp
from .tracing import Tracing, recorded_trace

# How long close() waits for a thread that should end at once; one that hangs is left behind.
_JOIN_S = 5.0


class Server(Health):
    """Serves one or more servables from one device, or from several that each hold all of them.

    Use it as a context manager (starts, waits until ready, drains and closes), or call `start`,
    `wait_ready` and `close`.

    Args:
        servables: what to serve; names are distinct.
        max_wait_s: most seconds that an idle device waits for a batch to fill.
        wait: ``"fixed"``: an idle device always waits that long; ``"adaptive"``: only as long as the costs of
            runs and the arrivals of late say that it pays.
        max_age_s: a row that waited so long goes before every younger one, whatever the priorities.
        priority_weights: shares of the device's time by priority, such as ``{1: 8, 5: 2}``; those not named
            have 1. None for strict order.
        queue: bounds on what may wait.
        max_request_rows: most rows in one request.
        timeout_s: most seconds that any request may take; a caller may ask for less. None for no bound.
        stall_s: a device that finishes nothing of what it holds for so long is taken for hung: `live` and
            `ready` turn false and those who wait are told.
        faults: what is done about a device that fails: retries, and when it is left alone.
        ready_when: ``"grid"``: ready once every bucket is warm; ``"coverage"``: once the bucket that holds
            everything is, the others following in the background.
        seal: forbid tracing in the whole process once warm (`servax serve` does); otherwise only the
            server's own path is kept from compiling.
        depth: batches in flight on each device; by default 1 on a CPU, 2 elsewhere.
        devices: where the models are copied to; one queue feeds them all, and one that fails is left out.
            A servable that is placed on a mesh takes as many for each copy. None for the default device,
            or those that a servable is placed on.
        on_progress: called with the model's name and each warm-up step, in the warm-up thread.
        on_batch: called with each batch's record, in the device thread.
        on_fault: called with each fault of the device, in the device thread.
        store: where programs are kept between starts; None keeps none.
        refit: when a grid that no longer fits what arrives is fitted anew; None for never.
        programs: how programs are ordered, kept, budgeted and checked.
        clock: source of time, for tests.
        compile_program: makes the program of a bucket (`batching.fake_device` needs no model);
            None compiles it unless it is stored or in memory.
        tracing: makes spans of the calls that a transport traces; None costs one check a call.

    Raises:
        ConfigError: on an impossible setting.
    """

    def __init__(
        self,
        *servables: Servable,
        max_wait_s: float = 0.0,
        wait: str = "fixed",
        max_age_s: float = 1.0,
        priority_weights: Mapping[int, float] | None = None,
        queue: QueueLimits | None = None,
        max_request_rows: int = 2048,
        timeout_s: float | None = None,
        stall_s: float = 120.0,
        faults: FaultPolicy | None = None,
        ready_when: str = "grid",
        seal: bool = False,
        depth: int | None = None,
        devices: Sequence[jax.Device] | None = None,
        on_progress: OnProgress | None = None,
        on_batch: Callable[[BatchRecord], None] | None = None,
        on_fault: Callable[[FaultRecord], None] | None = None,
        store: Store | None = None,
        refit: RefitPolicy | None = None,
        programs: Programs | None = None,
        clock: Clock | None = None,
        compile_program: Compile | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__()
        check_servables(servables)
        limits = queue if queue is not None else QueueLimits()
        if max_request_rows > limits.rows:
            raise ConfigError(
                f"max_request_rows is at most the {limits.rows} rows of the queue; got {max_request_rows}"
            )
        for servable in servables:
            check_window(limits, servable.grid.max_rows, max_wait_s)
        policy = Policy(
            max_wait_s=max_wait_s,
            wait=wait,
            max_age_s=max_age_s,
            weights=priority_weights,
            fair=limits.fair,
        )
        self.options: Mapping[str, Any] = MappingProxyType(
            {
                "max_wait_ms": max_wait_s * 1e3,
                "wait": wait,
                "max_age_s": max_age_s,
                "priorities": written_weights(priority_weights),
                "max_request_rows": max_request_rows,
                "timeout_s": timeout_s,
                "stall_s": stall_s,
                "ready_when": ready_when,
                "seal": seal,
            }
            | {f"queue.{name}": value for name, value in asdict(limits).items()}
            | {f"faults.{name}": value for name, value in asdict(faults or FaultPolicy()).items()}
        )
        self._clock = clock if clock is not None else MonotonicClock()
        stored: StoredPrograms | None = None
        if compile_program is None or store is not None:
            compile_program = stored = StoredPrograms(store)
        self._compiler = CompileService()
        make: Compile = compile_program
        count = 1
        if devices is not None:
            make = replicas = Replicas(devices, make, devices_each(servables))
            count = len(replicas.places)
        self._dispatcher = Dispatcher(self._clock, limits, stall_s=stall_s, faults=faults, devices=count)
        shared = Shared(
            dispatcher=self._dispatcher,
            compiler=self._compiler,
            clock=self._clock,
            sinks=Sinks(),
            policy=policy,
            max_request_rows=max_request_rows,
            timeout_s=timeout_s,
            ready_when=ready_when,
            compile_program=make,
            programs=programs if programs is not None else Programs(),
        )
        made = [Model(servable, shared) for servable in servables]
        served = {model.name: model for model in made}
        self.models: Mapping[str, Model] = MappingProxyType(served)
        if depth is None:
            depth = 1 if jax.default_backend() == "cpu" else 2
        self._device = DeviceLoops(
            self._dispatcher,
            made,
            self._clock,
            count,
            depth=depth,
            on_batch=on_batch,
            on_fault=on_fault,
            faults=faults,
        )
        if tracing is not None:
            self._dispatcher.trace_of_call, self._device.on_landed = recorded_trace, tracing.landed
        self._warmup = WarmUp(
            made,
            self._compiler,
            self._dispatcher,
            self._clock,
            seal=seal,
            on_progress=on_progress,
            stored=stored,
            options=shared.programs,
        )
        self._refitting = Refitting(refit, made, self._dispatcher, self._clock, self._warmup.prober.probe)
        self.refitters: Mapping[str, Refitter] = self._refitting.by_name
        self._versions = Versions(made, served, shared, self._warmup, self._refitting)

    # -- life ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._dispatcher.start()
        self._device.start()
        # Not before: a probe that comes in between would see a server without its device thread.
        self._state = "started"
        self._warmup.start()
        self._refitting.start()

    def _end(self, drain_s: float, *, started: bool) -> None:
        try:
            self._dispatcher.drain()
            self._warmup.stop()
            self._versions.stop()
            self._refitting.stop()
            self._dispatcher.wait_idle(drain_s)
        finally:
            self._dispatcher.close()
            self._device.join(_JOIN_S)
            self._compiler.close()
            self._warmup.join(_JOIN_S)
            self._refitting.join(_JOIN_S)
            if not self._device.alive:
                self._warmup.remember()

    def _hurry(self) -> None:
        self._dispatcher.close()

    @property
    def _inside(self) -> bool:
        return self._device.current

    # -- versions -----------------------------------------------------------------------------------

    def replace(self, servable: Servable, *, timeout_s: float = 300.0) -> Model:
        """Swap a new version of a model in without a pause; blocks until the old one has let go.

        The new version is warmed beside the old one, and no batch mixes them. Where grids are fitted to
        traffic, the new version begins with the fitted one, and is re-fitted on.

        Args:
            servable: the new version, under the name of a model that is served.
            timeout_s: most seconds to wait for the last answer of the old version.

        Raises:
            ConfigError, WarmupError, Closed, StillAnswers: see `Versions.change`.
        """
        return self._versions.change(servable, timeout_s)

    # -- answers ------------------------------------------------------------------------------------

    def model(self, name: str | None = None) -> Model:
        """A model by name; the name may be left out where there is only one.

        Raises:
            UnknownModel: naming those that are served.
        """
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            raise UnknownModel(
                f"models served here are {sorted(self.models)}; got {name!r}: name one of them"
            )
        return self.models[name]

    def __call__(
        self, *args: Any, model: str | None = None, timeout_s: float | None = None, **inputs: Any
    ) -> Any:
        """Answer one item or a batch, blocking.

        Args:
            args: the input itself, where the model takes only one.
            model: name of the model, where there are several.
            timeout_s: seconds until the answer must be there.
            inputs: arrays by input name: with the declared dims for one item, or with one more, rows, in
                front.

        Returns:
            What the model returns, with NumPy leaves: without a batch dim for one item, with it for rows.
        """
        call = read_call(self.model(model), args, inputs)
        future = call.model.run_threaded(call.rows, timeout_s=timeout_s)
        try:
            return call.answer(future.result())
        except BaseException:
            future.cancel()  # KeyboardInterrupt: nobody waits any more
            raise

    async def submit(
        self,
        *args: Any,
        model: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        timeout_s: float | None = None,
        **inputs: Any,
    ) -> Any:
        """Answer one item or a batch, for asyncio; as `__call__` otherwise.

        Cancelling the awaiting task frees the request's place at once.
        """
        call = read_call(self.model(model), args, inputs)
        return call.answer(await call.model.run(call.rows, priority=priority, timeout_s=timeout_s))

    def map(self, items: Iterable[Mapping[str, Any]], *, model: str | None = None) -> list[Any]:
        """Answer items of different sizes, blocking; any number, planned together, since none is urgent.

        It leaves at least half of the queue to other callers.

        Args:
            items: arrays of each item by input name; read some thousand ahead, while earlier ones run.
            model: name of the model, where there are several.

        Returns:
            What the model returns for each item, in order.

        Raises:
            ServerError: what an item that fails raises; Overloaded if other callers fill the queue for half a
                minute.
        """
        return map_items(self.model(model), items)
