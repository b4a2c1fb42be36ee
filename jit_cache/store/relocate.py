"""Executables that run on other devices than those they were compiled for.

`jax.experimental.serialize_executable` loads a program for its own devices only: the ids stand in what JAX
wrote beside it, and the runtime takes the assignment of devices from the program. Both are replaced here.
Where tests do not show that this works, a program of one addition is moved first: a runtime that went on
sending a program to its old devices would fail at every call, and end the process if those are several.

Only what the compiler itself wrote down is whole: an executable that was loaded and is serialized again has
lost its machine code (jaxlib 0.10.2 on CPU: it answers wrongly). So copies are made from the first bytes.
"""

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client

from ..errors import OtherDevices

# JAX's own cache of programs leaves devices out of its keys on GPUs; not on TPUs, so they are not moved here.
_PLATFORMS = ("cpu", "gpu")
_TESTED = ("cpu",)


def relocatable(devices: Sequence[jax.Device]) -> bool:
    """Whether a program of these devices is expected to load for as many others of their kind."""
    return (
        all(one.platform in _PLATFORMS and one.process_index == jax.process_index() for one in devices)
        and len({one.device_kind for one in devices}) == 1
    )


def load_for(
    program: bytes, trees: tuple[Any, Any], ids: Sequence[int], devices: Sequence[jax.Device]
) -> Any:
    """Load a program that was compiled for other devices.

    Args:
        program: what `serialize_executable.serialize` returned of an executable that was compiled.
        trees: of its inputs and of its outputs.
        ids: of the devices that it was compiled for, in the mesh's order.
        devices: where it is going to run, likewise; of the same kind.

    Returns:
        A `jax.stages.Compiled`.

    Raises:
        OtherDevices: if it cannot be moved there.
    """
    if len(ids) != len(devices) or not relocatable(devices):
        raise OtherDevices(_message(ids, devices, "they are others, or not alike"))
    if problem := _problem_of(devices[0].platform):
        raise OtherDevices(_message(ids, devices, problem))
    try:
        return _load(program, trees, ids, devices)
    except Exception as error:  # of a JAX that writes or loads programs in another way
        raise OtherDevices(_message(ids, devices, f"{type(error).__name__}: {error}")) from error


def _load(program: bytes, trees: tuple[Any, Any], ids: Sequence[int], devices: Sequence[jax.Device]) -> Any:
    unloaded, infos, no_kwargs = _Relocating(program, ids, devices).load()
    return jax.stages.Compiled(unloaded.load(), [], trees[0].unflatten(infos), trees[1], no_kwargs=no_kwargs)


@functools.cache
def _problem_of(platform: str) -> str:
    """Why programs are not moved on a platform; empty if they are. Asked once a process."""
    known = jax.local_devices(backend=platform)
    if platform in _TESTED or len(known) < 2:
        return ""
    one = jax.ShapeDtypeStruct((), np.int32, sharding=SingleDeviceSharding(known[0]))
    try:
        program, *trees = serialize_executable.serialize(jax.jit(lambda x: x + 1).lower(one).compile())
        moved = _load(program, (trees[0], trees[1]), [known[0].id], [known[-1]])
        found = moved(np.int32(1))
        good = found.devices() == {known[-1]} and int(found) == 2
    except Exception as error:  # the runtime's own
        return f"one that was tried failed with {type(error).__name__}: {error}"
    return "" if good else f"one that was tried gave {found} on {found.devices()}"


class _Relocating(pickle.Unpickler):
    """Reads what JAX wrote, with each device in place of the one with its number."""

    def __init__(self, program: bytes, ids: Sequence[int], devices: Sequence[jax.Device]) -> None:
        super().__init__(io.BytesIO(program))
        self._by_id = dict(zip(ids, devices, strict=True))
        self._devices = devices

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("device", int(number)):
                return self._by_id[number]
            case ("client",):
                return self._devices[0].client
            case ("exec", bytes(program)):
                return self._devices[0].client.deserialize_executable(
                    program,
                    executable_devices=xla_client.DeviceList(tuple(self._devices)),
                    compile_options=_assigned(self._devices),
                )
        raise pickle.UnpicklingError(
            f"a stored program refers to devices, clients and executables; got {pid!r}"
        )


def _assigned(devices: Sequence[jax.Device]) -> Any:
    """Options that say where a program runs; what it does was decided when it was compiled."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = True
    # (replicas, partitions): JAX spreads a program over partitions.
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[one.id for one in devices]]))
    return options


def _message(ids: Sequence[int], devices: Sequence[jax.Device], why: str) -> str:
    return (
        f"a program moves to as many devices of the kind it was compiled for, {list(ids)}; got "
        f"{[f'{one.platform} {one.id}' for one in devices]}, and {why}: compile it for these"
    )
