"""One copy of every program on each of several devices; the calling thread says which of them it runs.

A copy takes one device, or as many as the mesh that a model is spread over: then each copy is spread over
devices of its own. A program is compiled once and loaded in the other places (`copies`), where its platform
can do that; elsewhere once for each.
"""

import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..bucketing import Bucket
from .errors import SignatureError
from .placement import Placement
from .program import Program, ProgramFacts
from .servable import Servable
from .step_program import SteppedProgram, compile_stepped
from .stepped import StepPlan
from .store.relocate import relocatable

_log = logging.getLogger(__name__)
Compile = Callable[[Servable, Bucket, Sequence[Any]], Program]
_AXIS = "replica"


class _Here(threading.local):
    index = 0


_here = _Here()


@contextmanager
def on_replica(index: int) -> Iterator[None]:
    """Within it this thread runs the copies of one place."""
    before, _here.index = _here.index, index
    try:
        yield
    finally:
        _here.index = before


class ReplicatedProgram(Program):
    """A program in several places; calling it runs the copy of the thread's own.

    Args:
        copies: one for each place, all at the same bucket.
        leaves: the parameters that it was made with.
        replicas: who made it.
        servable: of what.
    """

    __slots__ = ("_copies", "_replicas", "_servable")

    def __init__(
        self,
        copies: Sequence[Program],
        leaves: Sequence[Any],
        replicas: "Replicas",
        servable: Servable,
    ) -> None:
        first = copies[0]
        super().__init__(
            first.bucket,
            first.executable,
            leaves,
            _facts_of(copies),
            used_leaves=first.used_leaves,
            used_inputs=first.used_inputs,
            variant=first.variant,
        )
        self._copies, self._replicas, self._servable = tuple(copies), replicas, servable

    def with_leaves(self, leaves: Sequence[jax.Array]) -> Program:
        """The same executables over other parameters, put in each place; compiles nothing."""
        placed = self._replicas.placed(self._servable, leaves)
        copies = [copy.with_leaves(mine) for copy, mine in zip(self._copies, placed, strict=True)]
        return ReplicatedProgram(copies, leaves, self._replicas, self._servable)

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Launch the copy of the thread's place."""
        return self._copies[_here.index](inputs)


class ReplicatedStepped(SteppedProgram):
    """The same of a stepped program; its cases are used as those of any other.

    Args:
        copies: one for each place, of the same plan.
        replicas: who made it.
        servable: of what.
    """

    def __init__(self, copies: Sequence[SteppedProgram], replicas: "Replicas", servable: Servable) -> None:
        first = copies[0]
        self.layout, self.executable, self.facts = first.layout, first.executable, _facts_of(copies)
        self.run_s = first.run_s
        self._copies, self._replicas, self._servable = tuple(copies), replicas, servable

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "ReplicatedStepped":
        """The same executables over other parameters, put in each place; compiles nothing."""
        placed = self._replicas.placed(self._servable, leaves)
        copies = [copy.with_leaves(mine) for copy, mine in zip(self._copies, placed, strict=True)]
        return ReplicatedStepped(copies, self._replicas, self._servable)

    def __call__(self, inputs: Mapping[str, Any]) -> list[jax.Array]:
        """Launch the copy of the thread's place."""
        return self._copies[_here.index](inputs)


def _facts_of(copies: Sequence[Program] | Sequence[SteppedProgram]) -> ProgramFacts:
    """Those of the first, as they are alike; ready once all are."""
    return replace(copies[0].facts, ready_s=sum(one.facts.ready_s for one in copies))


def devices_each(servables: Sequence[Servable]) -> int:
    """How many devices one copy of these models takes: those of a mesh, or one.

    Raises:
        SignatureError: if they are spread over meshes of several sizes, or over several processes.
    """
    for one in servables:
        if one.hosts is not None:
            raise SignatureError(
                f"copies are on devices of this process; model {one.name!r} is spread over several: "
                f"drop one, or have a group of processes for each copy"
            )
    sizes = {len(one.devices) for one in servables if one.devices is not None}
    if len(sizes) > 1:
        raise SignatureError(
            f"copies of models that are served together take as many devices each; these are spread over "
            f"{sorted(sizes)}: serve them apart, or over meshes of one size"
        )
    return sizes.pop() if sizes else 1


class Replicas:
    """Makes programs as another function does, once for each place.

    Args:
        devices: where; parameters are copied to each place.
        compile_program: makes the program of one place, given a servable that is placed there. Where it has
            methods ``stepped``, ``timed``, ``measured``, ``scratch`` and ``measured_scratch`` (as
            `StoredPrograms` does), stepped programs and what is remembered go through them too.
        each: devices of one place, see `devices_each`; those next to each other in `devices`. A model that is
            spread over none of its own takes the first of them.

    Attributes:
        places: the devices of each.

    Raises:
        SignatureError: if a device is given twice, or none is, or they do not come out even.
    """

    def __init__(self, devices: Sequence[jax.Device], compile_program: Compile, each: int = 1) -> None:
        if not devices or len(set(devices)) < len(devices):
            raise SignatureError(f"replicas are on distinct devices, one at least; got {list(devices)}")
        if len(devices) % each:
            raise SignatureError(
                f"each replica takes {each} devices, as many as the mesh of its model; got {len(devices)}: "
                f"give a multiple, or another mesh"
            )
        self.places = tuple(tuple(devices[begin : begin + each]) for begin in range(0, len(devices), each))
        if len(self.places) > 1 and not relocatable(devices):
            kinds = ", ".join(sorted({one.device_kind for one in devices}))
            _log.warning(
                "each program is compiled %d times: those of %s are not moved", len(self.places), kinds
            )
        self._compile = compile_program
        self._servables: weakref.WeakKeyDictionary[Servable, list[Servable]] = weakref.WeakKeyDictionary()
        # By the name of a model: those of its latest version.
        self._leaves: dict[str, tuple[tuple[Any, ...], list[Sequence[Any]]]] = {}

    def __call__(self, servable: Servable, bucket: Bucket, leaves: Sequence[Any]) -> Program:
        """The program of a bucket in every place; raises as the inner function does."""
        placed = self.placed(servable, leaves)
        copies = [
            self._compile(one, bucket, mine) for one, mine in zip(self._on(servable), placed, strict=True)
        ]
        return ReplicatedProgram(copies, leaves, self, servable)

    def stepped(self, servable: Servable, plan: StepPlan, leaves: Sequence[Any]) -> SteppedProgram:
        """The stepped program of a plan in every place; raises as the inner method does."""
        make = getattr(self._compile, "stepped", compile_stepped)
        placed = self.placed(servable, leaves)
        copies = [make(one, plan, mine) for one, mine in zip(self._on(servable), placed, strict=True)]
        return ReplicatedStepped(copies, self, servable)

    # What is known of the first copy counts for all: their devices are alike.

    def timed(self, servable: Servable, bucket: Bucket, plan: StepPlan | None = None) -> float | None:
        """See `StoredPrograms.timed`."""
        found: float | None = self._inner("timed", servable, bucket, plan)
        return found

    def infer_outputs(self, servable: Servable) -> None:
        """See `StoredPrograms.infer_outputs`."""
        infer = getattr(self._compile, "infer_outputs", None)
        _ = servable.outputs if infer is None else infer(servable)

    def measured(
        self, servable: Servable, bucket: Bucket, run_s: float, plan: StepPlan | None = None
    ) -> None:
        """See `StoredPrograms.measured`."""
        self._inner("measured", servable, bucket, run_s, plan)

    def scratch(self, servable: Servable, bucket: Bucket) -> int | None:
        """See `StoredPrograms.scratch`."""
        found: int | None = self._inner("scratch", servable, bucket)
        return found

    def measured_scratch(self, servable: Servable, bucket: Bucket, nbytes: int) -> None:
        """See `StoredPrograms.measured_scratch`."""
        self._inner("measured_scratch", servable, bucket, nbytes)

    def _inner(self, name: str, servable: Servable, *rest: Any) -> Any:
        method = getattr(self._compile, name, None)
        return None if method is None else method(self._on(servable)[0], *rest)

    def _on(self, servable: Servable) -> list[Servable]:
        """The servable in each place."""
        found = self._servables.get(servable)
        if found is None:
            found = self._servables[servable] = [self._at(servable, place) for place in self.places]
        return found

    def _at(self, servable: Servable, place: Sequence[jax.Device]) -> Servable:
        if servable.placement is None:
            return servable.placed(Placement(Mesh(np.array(place[:1]), (_AXIS,))))
        if len(servable.placement.devices) != len(place):
            raise SignatureError(
                f"a model is spread over as many devices as each replica has, {len(place)}; the mesh of "
                f"{servable.name!r} has {len(servable.placement.devices)}: keep its size"
            )
        return servable.placed(servable.placement.on(place))

    def placed(self, servable: Servable, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """The parameters in each place; those of one model are copied once for all its programs."""
        if not leaves or not isinstance(leaves[0], jax.Array):  # none, or shapes only
            return [leaves] * len(self.places)
        mine = tuple(leaves)
        known = self._leaves.get(servable.name)
        # All of them: a later version may keep some.
        if known is not None and len(known[0]) == len(mine) and all(map(operator.is_, known[0], mine)):
            return known[1]
        placed: list[Sequence[Any]] = [
            [jax.device_put(leaf, at) for leaf, at in zip(leaves, one.shardings or (), strict=True)]
            for one in self._on(servable)
        ]
        self._leaves[servable.name] = mine, placed
        return placed
