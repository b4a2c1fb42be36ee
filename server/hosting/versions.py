"""A new version of a model in the place of the old one: warmed beside it, swapped in, the old one drained.

Each version has a lane of its own, so that no batch mixes them. Requests that were let in before the swap are
answered by the old version; its programs and weights are let go once the last of them has landed.
"""

import threading
from collections.abc import MutableMapping, MutableSequence, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial

from ...jit_cache import CompileError, Input, Output, Program, Servable, warm_up
from ...jit_cache.outputs import same_structure
from ..batching.device import Retire
from ..batching.dispatcher import Dispatcher
from ..errors import Closed, ConfigError, StillAnswers
from ..events import NEW_VERSION
from .model import Model
from .preparing import prepare
from .refitting import Refitting
from .shared import Shared
from .warming import WarmUp


def check_servables(given: Sequence[object]) -> None:
    """Refuse what a server cannot serve.

    Raises:
        ConfigError: there is none, something else than a `Servable`, or a name twice.
    """
    for one in given:
        if not isinstance(one, Servable):
            raise ConfigError(
                f"a server serves `Servable`s, got {type(one).__name__}: make one by `servax.Servable`, "
                "`servax.from_nnx`, or `servax.server.text_servable` of a loaded encoder"
            )
    names = [one.name for one in given if isinstance(one, Servable)]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"a server needs models with distinct names; got {names}: name them")


class Versions:
    """Changes the models of a running server.

    Args:
        by_lane: every model that has a lane, in order; the device thread reads it.
        by_name: the models that are served.
        shared: what models have in common.
        warmup: runs new programs on the device thread, from where on they are planned with.
        refitting: fits grids to traffic; goes on with the new version.
    """

    def __init__(
        self,
        by_lane: MutableSequence[Model],
        by_name: MutableMapping[str, Model],
        shared: Shared,
        warmup: WarmUp,
        refitting: Refitting,
    ) -> None:
        self._by_lane, self._by_name = by_lane, by_name
        self._shared, self._warmup, self._refitting = shared, warmup, refitting
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._shared.dispatcher

    def stop(self) -> None:
        """Begin no more buckets: the server ends."""
        self._stop.set()

    def change(self, servable: Servable, timeout_s: float) -> Model:
        """Serve this servable under its name from now on; blocks until the old version has let go.

        Args:
            servable: the new version; its name is one that is served.
            timeout_s: most seconds to wait for the last request of the old version.

        Returns:
            The new model.

        Raises:
            ConfigError: if no model has that name, or the new one takes or returns something else.
            WarmupError: if a program of it cannot be made; the old version stays.
            Closed: if the server ended meanwhile.
            StillAnswers: a TimeoutError, if the old version still answers; the new one serves all the same,
                and the old one lets go later.
        """
        check_servables([servable])
        with self._lock:
            old = self._by_name.get(servable.name)
            if old is None:
                raise ConfigError(
                    f"a new version has the name of a model that is served, {sorted(self._by_name)}; got "
                    f"{servable.name!r}: rename it"
                )
            new = Model(servable, self._shared)
            new.maker.cause = NEW_VERSION
            self._by_lane[new.lane : new.lane + 1] = [new]  # in the place of one that left, or at the end
            self._refitting.hand_over(old, new)
            try:
                self._warm(old, new)
                self._by_name[new.name] = new
                old.give_way(new)
            finally:
                self._refitting.resume(self._by_name[new.name])
            retired = Retire(old, Future())
            self._dispatcher.post(retired)
        try:
            retired.done.result(timeout_s)
        except TimeoutError:
            retired.done.add_done_callback(lambda _: self._free(old))
            raise _still_answers(new, old, timeout_s) from None
        freed = self._free(old)
        if freed is not None:
            try:
                freed.result(timeout_s)
            except CancelledError:  # the server ends, and with it both versions
                pass
            except TimeoutError:
                raise _still_answers(new, old, timeout_s) from None
        return new

    def _probe_in_lull(self, model: Model, program: Program) -> float:
        self._dispatcher.wait_lull()
        return self._warmup.prober.probe(model, program)

    def _free(self, old: Model) -> "Future[None] | None":
        """Let a version's programs and weights go in the compile thread: it takes as long as a batch."""
        try:
            return self._shared.compiler.submit(partial(self._unload_in_lull, old))
        except CompileError:  # the server ended
            return None

    def _unload_in_lull(self, model: Model) -> None:
        self._dispatcher.wait_lull()
        model.unload()

    def _warm(self, old: Model, model: Model) -> None:
        # Two versions are in memory at once here: a plan for one would be wrong.
        options, compiler = replace(self._shared.programs, memory_bytes=None), self._shared.compiler
        try:
            if prepare([model], options, compiler):
                begin_s = self._shared.clock.now()
                warm_up(
                    model.cache,
                    model.order,
                    partial(self._probe_in_lull, model),
                    report=model.report,
                    stop=self._stop,
                    before=self._dispatcher.wait_lull,
                )
                self._warmup.time_again(model, model.order, begin_s)
            if model.report.stopped:
                raise Closed("the server closed before the new version was warm: it is not served")
            if not model.ready:
                model.report.require_complete()
            _require_alike(old, model)
        except BaseException:
            model.leave()  # nothing was ever let in
            model.unload()
            raise


def _still_answers(new: Model, old: Model, timeout_s: float) -> StillAnswers:
    return StillAnswers(
        f"{new.name!r} {new.version!r} serves; {old.version!r} was to let go within {timeout_s:g} s of that "
        f"and has {sum(old.own_load())} rows left: it does once they are answered: wait, or allow more time"
    )


def _require_alike(old: Model, new: Model) -> None:
    """Who holds a request of the old version may get the answer of the new one."""
    mine, theirs = old.servable.outputs, new.servable.outputs
    alike = mine.leaves == theirs.leaves and same_structure(mine.treedef, theirs.treedef)
    if old.inputs != new.inputs or not alike:
        raise ConfigError(
            f"a new version takes and returns the same tensors; {new.name!r} {new.version!r} has the inputs "
            f"{_listed(new.inputs)} and the outputs {_listed(theirs.leaves)}, and {old.version!r} had "
            f"{_listed(old.inputs)} and {_listed(mine.leaves)}: serve it under another name"
        )


def _listed(tensors: Sequence[Input] | Sequence[Output]) -> str:
    return ", ".join(f"{one.name} {one.dtype}{list(one.dims)}" for one in tensors)
