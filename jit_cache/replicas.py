"""One copy of every program on each of several devices; the calling thread says which of them it runs."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..bucketing import Bucket
from .errors import SignatureError
from .placement import Placement
from .program import Program
from .servable import Servable

Compile = Callable[[Servable, Bucket, Sequence[Any]], Program]
_AXIS = "replica"


class _Here(threading.local):
    index = 0


_here = _Here()


@contextmanager
def on_replica(index: int) -> Iterator[None]:
    """Within it this thread runs the copies of one device."""
    before, _here.index = _here.index, index
    try:
        yield
    finally:
        _here.index = before


class ReplicatedProgram(Program):
    """A program on several devices; calling it runs the copy of the thread's own device.

    Args:
        copies: one for each device, all at the same bucket.
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
            first.facts,
            used_leaves=first.used_leaves,
            used_inputs=first.used_inputs,
        )
        self._copies, self._replicas, self._servable = tuple(copies), replicas, servable

    def with_leaves(self, leaves: Sequence[jax.Array]) -> Program:
        """The same executables over other parameters, put on each device; compiles nothing."""
        placed = self._replicas.placed(self._servable, leaves)
        copies = [copy.with_leaves(mine) for copy, mine in zip(self._copies, placed, strict=True)]
        return ReplicatedProgram(copies, leaves, self._replicas, self._servable)

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Launch the copy of the thread's device."""
        return self._copies[_here.index](inputs)


class Replicas:
    """Makes programs as another function does, once for each device.

    Args:
        devices: where; parameters are copied to each.
        compile_program: makes the program of one device, given a servable that is placed there.

    Raises:
        SignatureError: if a device is given twice, or none is.
    """

    def __init__(self, devices: Sequence[jax.Device], compile_program: Compile) -> None:
        if not devices or len(set(devices)) < len(devices):
            raise SignatureError(f"replicas are on distinct devices, one at least; got {list(devices)}")
        self.devices = tuple(devices)
        self._compile = compile_program
        self._servables: weakref.WeakKeyDictionary[Servable, list[Servable]] = weakref.WeakKeyDictionary()
        # By the name of a model: those of its latest version.
        self._leaves: dict[str, tuple[jax.Array, list[Sequence[Any]]]] = {}

    def check(self, servable: Servable) -> None:
        """Refuse a servable that cannot be copied as a whole.

        Raises:
            SignatureError: if it is spread over devices itself, or runs several batches a call.
        """
        if servable.placement is not None:
            raise SignatureError(
                f"a replica is one device; model {servable.name!r} is placed on several itself: drop one"
            )
        if "switched" in servable.variants or servable.layout == "packed":
            raise SignatureError(
                f"replicas run static programs over padded rows; model {servable.name!r} has the layout "
                f"{servable.layout!r} and the variants {list(servable.variants)}: leave its sizes out"
            )

    def __call__(self, servable: Servable, bucket: Bucket, leaves: Sequence[Any]) -> Program:
        """The program of a bucket on every device; raises as the inner function does."""
        placed = self.placed(servable, leaves)
        copies = [
            self._compile(one, bucket, mine) for one, mine in zip(self._on(servable), placed, strict=True)
        ]
        return ReplicatedProgram(copies, leaves, self, servable)

    def _on(self, servable: Servable) -> list[Servable]:
        found = self._servables.get(servable)
        if found is None:
            found = [
                servable.placed(Placement(Mesh(np.array([device]), (_AXIS,)))) for device in self.devices
            ]
            self._servables[servable] = found
        return found

    def placed(self, servable: Servable, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """The parameters on each device; those of one model are copied once for all its programs."""
        first = leaves[0] if leaves else None
        if not isinstance(first, jax.Array):  # shapes only, or none
            return [leaves] * len(self.devices)
        known = self._leaves.get(servable.name)
        if known is not None and known[0] is first:
            return known[1]
        placed: list[Sequence[Any]] = [
            [jax.device_put(leaf, at) for leaf, at in zip(leaves, one.shardings or (), strict=True)]
            for one in self._on(servable)
        ]
        self._leaves[servable.name] = first, placed
        return placed
