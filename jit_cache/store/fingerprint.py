"""The key of a stored program: everything that decides what it computes, and nothing else.

A fingerprint is a nested dictionary of plain values with fixed sections; its digest names the entry, and
the dictionary itself is compared on a hit, so a collision of digests costs a compile and never a wrong
answer. Nothing is traced to make one.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..errors import FingerprintError
from .codedigest import digest_of
from .entry import canonical
from .environment import environment_facts, placement_facts

ALLOWED: Mapping[str, frozenset[str]] = {
    "model": frozenset({"code", "config", "params", "params_tree"}),
    "program": frozenset({"bucket", "inputs", "outputs", "variant", "donated", "options"}),
    "placement": frozenset({"count", "ids", "kinds", "process", "processes", "shardings"}),
    "environment": frozenset(
        {
            *("servax", "python", "jax", "jaxlib", "platform", "platform_version", "libraries"),
            *("device_kind", "cpu", "cpu_threads", "xla_flags", "config"),
        }
    ),
}
"""Sections of a fingerprint and the fields each may have."""


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a program.

    Attributes:
        fields: the sections of `ALLOWED`, of plain JSON values; compared as a whole.
        notes: digests of single functions, to say which one differs; not part of the identity.

    Raises:
        FingerprintError: if a section or field is not on the list, or a value is no plain JSON.
    """

    fields: Mapping[str, Mapping[str, Any]]
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for section, values in self.fields.items():
            unknown = values.keys() - ALLOWED.get(section, frozenset())
            if section not in ALLOWED or unknown:
                allowed = {name: sorted(one) for name, one in ALLOWED.items()}
                raise FingerprintError(
                    f"a fingerprint has the fields {allowed}; got {section!r}: {sorted(unknown)}: remove it"
                )
        # One spelling: tuples become lists, keys strings, as they come back from disk.
        object.__setattr__(self, "fields", json.loads(_canonical(self.fields)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fields, 64 hexadecimal digits."""
        return hashlib.sha256(_canonical(self.fields)).hexdigest()

    @cached_property
    def environment_digest(self) -> str:
        """SHA-256 of what runs programs, the same for all programs of a process."""
        return hashlib.sha256(_canonical(self.fields.get("environment", {}))).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        bucket = self.fields.get("program", {}).get("bucket")
        return f"{self.digest[:12]} {bucket or ''}".rstrip()


def _canonical(value: Any) -> bytes:
    try:
        return canonical(value)
    except (TypeError, ValueError) as error:
        raise FingerprintError(f"a fingerprint holds plain JSON values; {error}") from None


def explain(a: Fingerprint, b: Fingerprint) -> str:
    """Why two programs have different keys: one line for each field that differs, ``-`` for a, ``+`` for b.

    Returns:
        "same key" if nothing differs.
    """
    left, right = _flatten(a.fields), _flatten(b.fields)
    lines = []
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            lines += [name, f"  - {left.get(name, 'absent')}", f"  + {right.get(name, 'absent')}"]
            if name == "model.code":
                lines += _changed_functions(a.notes, b.notes)
    return "\n".join(lines) or "same key"


def nearest(key: Fingerprint, others: Iterable[Fingerprint]) -> Fingerprint | None:
    """The fingerprint that differs from a key in the fewest fields; the first of equals, None of none."""
    mine = _flatten(key.fields)

    def distance(other: Fingerprint) -> int:
        theirs = _flatten(other.fields)
        return sum(mine.get(name) != theirs.get(name) for name in mine.keys() | theirs.keys())

    return min(others, key=distance, default=None)


def _changed_functions(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    changed = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    words = {(False, True): "only in +", (True, False): "only in -", (True, True): "differs"}
    return [f"    {name}: {words[name in a, name in b]}" for name in changed]


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, str] = {}
        for name, one in value.items():
            flat |= _flatten(one, f"{path}.{name}" if path else str(name))
        return flat
    if isinstance(value, list) and value and isinstance(value[0], list):
        return {f"{path}[{index}]": json.dumps(one) for index, one in enumerate(value)}
    return {path: json.dumps(value, sort_keys=True)}


class Fingerprinter:
    """Makes the fingerprints of one model's programs; what they share is digested once.

    Args:
        code: the function that is traced, or several values that decide it together.
        params: pytree of its parameters, arrays or `jax.ShapeDtypeStruct`; only shapes, dtypes and
            structure count.
        config: anything else that decides the program, such as a model's configuration.
        devices: those it runs on, in the mesh's order; default: the first one of this process.
        shardings: pytree of the shardings of parameters and inputs, if any are given.
        donated: names of donated inputs.
        options: compiler options, by name.

    Raises:
        FingerprintError: if the code or the configuration cannot be described.
    """

    def __init__(
        self,
        code: Any,
        *,
        params: Any = None,
        config: Any = None,
        devices: Sequence[jax.Device] | None = None,
        shardings: Any = None,
        donated: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.devices = tuple(devices) if devices is not None else (jax.local_devices()[0],)
        digest = digest_of(code)
        leaves, tree = jax.tree.flatten(params)
        self._notes = digest.units
        self._model = {
            "code": digest.digest,
            "config": digest_of(config).digest,
            "params": [shape_and_dtype(leaf) for leaf in leaves],
            "params_tree": digest_of(tree).digest,
        }
        self._program = {
            "donated": sorted(donated),
            "options": {name: str(value) for name, value in (options or {}).items()},
        }
        self._placement = placement_facts(self.devices)
        self._placement["shardings"] = digest_of(_by_place(shardings, self.devices)).digest

    def is_of(self, code: Any) -> bool:
        """Whether this is still the code that the fingerprints are of; traces nothing."""
        try:
            return digest_of(code).digest == self._model["code"]
        except FingerprintError:
            return False

    def at(
        self,
        inputs: Any,
        *,
        bucket: Mapping[str, int] | None = None,
        outputs: Any = None,
        variant: Any = None,
    ) -> Fingerprint:
        """The fingerprint of one program. Call it in the thread that compiles: settings are read there.

        Args:
            inputs: pytree of `jax.ShapeDtypeStruct`, what is traced.
            bucket: its sizes by axis; for people, the inputs already say it.
            outputs: declarations of outputs, if any; plain values.
            variant: which variant of the servable; plain values.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(inputs)
        program = {
            "bucket": dict(bucket or {}),
            "inputs": {jax.tree_util.keystr(path): shape_and_dtype(one) for path, one in paths},
            "outputs": outputs,
            "variant": variant,
            **self._program,
        }
        environment = environment_facts(self.devices[0])
        sections = {
            "model": self._model,
            "program": program,
            "placement": self._placement,
            "environment": environment,
        }
        return Fingerprint(sections, self._notes)


def _by_place(shardings: Any, devices: Sequence[jax.Device]) -> Any:
    """The same with the places of devices among these in place of their numbers."""
    places = {device: place for place, device in enumerate(devices)}

    def named(one: Any) -> Any:
        if not isinstance(one, NamedSharding) or not isinstance(one.mesh, Mesh):
            return one
        mesh = one.mesh
        order = [places.get(device, device) for device in mesh.devices.flat]
        shape = tuple(mesh.shape.items())
        return (shape, tuple(map(str, mesh.axis_types)), order, one.spec, str(one.memory_kind))

    return jax.tree.map(named, shardings)


def shape_and_dtype(value: Any) -> list[Any]:
    """``[dtype, [shape], weakly typed]`` of an array or an abstract one."""
    dtype = getattr(value, "dtype", None)
    name = str(dtype) if dtype is not None else str(jax.dtypes.result_type(value))
    return [name, [int(size) for size in np.shape(value)], bool(getattr(value, "weak_type", False))]
