"""Executables to bytes and back, through JAX's public `jax.experimental.serialize_executable`.

Three things it leaves to its callers are done here:

* A program is bound to the ids of its devices. Loaded for others as it is it aborts the process, when loaded
  or when called (jaxlib 0.10.2 on CPU), so ids are compared first; `relocate` changes them.
* Programs that call LAPACK crash in a process that has never lowered such a call, because its table of
  functions is still empty; lowering a 1 x 1 Cholesky once fills it.
* What cannot live in another process (host callbacks, closed-over arrays) is refused as `NotStorable`.
"""

import pickle
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from ..errors import NotStorable, OtherDevices
from . import relocate

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_prepared = False
_prepare_lock = threading.Lock()


class Codec(Protocol):
    """How the store turns an executable into bytes and back; tests put a cheap one in its place."""

    def dump(self, executable: Any, devices: Sequence[jax.Device] | None) -> tuple[bytes, Mapping[str, Any]]:
        """Bytes of an executable, and facts to keep beside them.

        Raises:
            NotStorable: if no other process could run it.
        """
        ...

    def load(self, payload: bytes, devices: Sequence[jax.Device] | None) -> Any:
        """The executable, ready to call; any exception means that it is refused here."""
        ...


class Executables:
    """The codec of `jax.stages.Compiled`."""

    def dump(self, executable: Any, devices: Sequence[jax.Device] | None) -> tuple[bytes, Mapping[str, Any]]:
        """See `dump`."""
        return dump(executable, devices)

    def load(self, payload: bytes, devices: Sequence[jax.Device] | None) -> Any:
        """See `load`."""
        return load(payload, devices)


def dump(executable: Any, devices: Sequence[jax.Device] | None = None) -> tuple[bytes, dict[str, Any]]:
    """Write a compiled program down.

    Args:
        executable: a `jax.stages.Compiled`.
        devices: those it was compiled for, in the mesh's order; None takes them from its shardings.

    Returns:
        The bytes, and the facts ``{"targets": names of the native functions it calls}``.

    Raises:
        NotStorable: if it holds what only this process has.
    """
    targets = sorted(set(_TARGET.findall(executable.as_text())))
    if callbacks := [name for name in targets if "callback" in name]:
        raise NotStorable(
            f"a stored program calls nothing of the process that made it; this one calls back into Python "
            f"({', '.join(callbacks)}): it is compiled at each start"
        )
    on = list(devices) if devices is not None else devices_of(executable)
    try:
        program, in_tree, out_tree = serialize_executable.serialize(executable)
        bundle = pickle.dumps(
            {
                "platform": on[0].platform,
                "ids": [device.id for device in on],
                "targets": targets,
                "program": program,
                "in_tree": in_tree,
                "out_tree": out_tree,
            },
            protocol=5,
        )
    except Exception as error:  # each kind of obstacle has its own exception type
        raise NotStorable(
            f"a stored program holds no Python objects and no closed-over arrays; serializing gave "
            f"{type(error).__name__}: {first_line(error)}: it is compiled at each start"
        ) from error
    return bundle, {"targets": targets}


def load(payload: bytes, devices: Sequence[jax.Device] | None = None) -> Any:
    """Load a program that `dump` wrote; only after the entry's signature was checked.

    Args:
        payload: what `dump` returned.
        devices: where it is going to run, in the mesh's order; None takes those of the program's ids, or
            the first ones if there are no such.

    Returns:
        A `jax.stages.Compiled`.

    Raises:
        OtherDevices: if it was compiled for others and cannot be moved.
        Exception: whatever else unpickling or the runtime raises.
    """
    bundle = pickle.loads(payload)
    ids, platform = bundle["ids"], bundle["platform"]
    if devices is None:
        # A store may be shared with other processes: their devices cannot be used here.
        local = jax.local_devices(backend=platform)
        known = {device.id: device for device in local}
        mine = all(one in known for one in ids)
        devices = [known[one] for one in ids] if mine else local[: len(ids)]
    if len(devices) != len(ids) or any(one.platform != platform for one in devices):
        raise OtherDevices(
            f"a program runs on as many devices as it was compiled for, {platform} {ids}; got "
            f"{[f'{one.platform} {one.id}' for one in devices]}: compile it for these"
        )
    if any(name.startswith("lapack_") for name in bundle["targets"]):
        _prepare_lapack()
    if [one.id for one in devices] != ids:
        trees = bundle["in_tree"], bundle["out_tree"]
        return relocate.load_for(bundle["program"], trees, ids, devices)
    return serialize_executable.deserialize_and_load(
        bundle["program"],
        bundle["in_tree"],
        bundle["out_tree"],
        backend=platform,
        execution_devices=list(devices),
    )


def devices_of(executable: Any) -> list[jax.Device]:
    """The devices a compiled program runs on, in the mesh's order.

    Raises:
        NotStorable: if there are several and no `NamedSharding` says in which order.
    """
    shardings = jax.tree.leaves((executable.input_shardings, executable.output_shardings))
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return [*sharding.mesh.devices.flat]
    for sharding in shardings:
        if len(sharding.device_set) == 1:
            return list(sharding.device_set)
    raise NotStorable("a stored program's devices have an order; pass them, in the order of its mesh")


def _prepare_lapack() -> None:
    global _prepared
    with _prepare_lock:
        if not _prepared:
            jax.jit(jax.lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))
            _prepared = True


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n", 1)[0][:300]
