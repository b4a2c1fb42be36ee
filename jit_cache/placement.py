"""Where a servable's parameters and inputs lie on several devices."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .errors import SignatureError
from .hosts import Hosts

_launches: dict[jax.Device, threading.Lock] = {}


class Turn:
    """Held while a program of several devices is launched.

    If two threads enqueued such programs on the same devices in different orders, each device would wait in
    its collective for another one's. Programs on devices apart do not wait for each other.

    Args:
        devices: where the program runs.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        # All take them in one order, or two could wait for each other.
        order = sorted(self.devices, key=lambda device: device.id)
        self._locks = [_launches.setdefault(device, threading.Lock()) for device in order]

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()


def turn_of(devices: Sequence[jax.Device] | None) -> Turn | None:
    """What launches on these devices take turns by; None on one device, where they need not."""
    return Turn(devices) if devices is not None and len(devices) > 1 else None


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a servable and how its arrays are split over them.

    Attributes:
        mesh: the devices, with named mesh axes.
        params: how parameters are split: one `jax.sharding.PartitionSpec` for all leaves, or a tree of them
            that is a prefix of the parameters' tree. By default each device holds a copy.
        inputs: how inputs are split, by name, over ``(batch, *dims)``; others are copied. Where a mesh axis
            does not divide a bucket's size, that dim is copied in that bucket.
        hosts: the processes that a mesh over the devices of several has; see `servax.jit_cache.hosts`.

    Raises:
        SignatureError: if a spec names an axis that the mesh has not, or the mesh has devices of other
            processes and `hosts` is not given.
    """

    mesh: Mesh
    params: Any = field(default_factory=PartitionSpec)
    inputs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        if self.spans:
            found = sorted({device.process_index for device in self.devices})
            if self.hosts is None or found != list(range(jax.process_count())):
                raise SignatureError(
                    f"a mesh has devices of this process, or of all of them and hosts that say how they "
                    f"reach each other; got devices of the processes {found} of {jax.process_count()} and "
                    f"hosts={self.hosts}: take jax.local_devices(), or give hosts and take jax.devices()"
                )
        for spec in (*_specs(self.params), *self.inputs.values()):
            if unknown := [axis for dim in spec for axis in _axes(dim) if axis not in self.mesh.axis_names]:
                raise SignatureError(
                    f"arrays are split over axes of the mesh, {list(self.mesh.axis_names)}; {spec} names "
                    f"{unknown}: rename it"
                )

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices, in the mesh's order."""
        return tuple(self.mesh.devices.flat)

    @property
    def spans(self) -> bool:
        """Whether it has devices of other processes."""
        return any(device.process_index != jax.process_index() for device in self.devices)

    @property
    def everywhere(self) -> NamedSharding:
        """A copy of the whole on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def automatic(self) -> bool:
        """Whether the compiler splits what lies between (`AxisType.Auto`), and not the function itself."""
        return all(kind == AxisType.Auto for kind in self.mesh.axis_types)

    def on(self, devices: Sequence[jax.Device]) -> "Placement":
        """The same split over as many other devices, in the mesh's order."""
        shape, names = self.mesh.devices.shape, self.mesh.axis_names
        mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=self.mesh.axis_types)
        return replace(self, mesh=mesh)

    def of_params(self, params: Any) -> list[NamedSharding]:
        """The sharding of each leaf of an abstract parameter tree, in order.

        Raises:
            SignatureError: if the specs are no prefix of the tree, or a mesh axis does not divide a dim.
        """
        try:
            spread = jax.tree.map(
                lambda spec, part: [spec] * len(jax.tree.leaves(part)), self.params, params, is_leaf=_is_spec
            )
        except ValueError as error:
            raise SignatureError(
                f"specs of parameters are a prefix of the parameters' tree; these are not: {error}"
            ) from None
        specs = jax.tree.leaves(spread, is_leaf=_is_spec)
        found = []
        for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(params)[0], specs, strict=True):
            if self._fitting(spec, leaf.shape) != spec:
                raise SignatureError(
                    f"a mesh axis divides the dims it splits; params{jax.tree_util.keystr(path)} has shape "
                    f"{list(leaf.shape)} and the spec {spec} over {dict(self.mesh.shape)}: split another dim"
                )
            found.append(NamedSharding(self.mesh, spec))
        return found

    def of_input(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """The sharding of an input at a bucket."""
        return NamedSharding(self.mesh, self._fitting(self.inputs.get(name, PartitionSpec()), shape))

    def _fitting(self, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
        """The spec without the dims that its mesh axes do not divide, or that are not there."""
        dims = []
        for place, dim in enumerate(spec):
            parts = math.prod(self.mesh.shape[axis] for axis in _axes(dim))
            dims.append(dim if place < len(shape) and shape[place] % parts == 0 else None)
        while dims and dims[-1] is None and len(dims) > len(shape):
            dims.pop()
        return PartitionSpec(*dims)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _specs(tree: Any) -> list[PartitionSpec]:
    return [one for one in jax.tree.leaves(tree, is_leaf=_is_spec) if _is_spec(one)]


def _axes(dim: Any) -> tuple[str, ...]:
    if dim is None or dim is PartitionSpec.UNCONSTRAINED:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)
