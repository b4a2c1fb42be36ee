"""One step of taking a Python value apart: what it is by itself, and the values it is made of.

`codedigest` walks with this from a function to everything it reaches. Addresses, names of the user's
functions, files and line numbers never enter; what cannot be told apart without them is an error.
"""

import copyreg
import enum
import functools
import hashlib
import logging
import pathlib
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import FingerprintError
from .code_parts import (
    Part,
    Scoped,
    Used,
    class_part,
    descriptor_part,
    function_part,
    is_naming,
    module_part,
    scoped_part,
    used_part,
)
from .library import named_in_library

Rule = Callable[[Any], Part]


def describe(value: Any) -> Part:
    """Take one value apart.

    Raises:
        FingerprintError: if nothing but its address tells it from others of its type.
    """
    if (rule := _EXACT.get(type(value))) is not None:
        return rule(value)
    for kinds, rule in _RULES:
        if isinstance(value, kinds):
            return rule(value)
    if (name := named_in_library(value)) is not None:
        return Part(("library", name))
    if isinstance(value, type):
        return class_part(value)
    if isinstance(value, types.FunctionType):
        return function_part(value)
    if isinstance(value, _WRAPPERS):
        return Part(("wrapper", type(value).__name__), (value.__wrapped__, _told(value)))
    return _object(value)


# What `jax.jit` and `functools.lru_cache` return: a cache around a function.
_JITTED: type[Any] = type(jax.jit(lambda: None))
_WRAPPERS: tuple[Any, ...] = (_JITTED, type(functools.lru_cache(lambda: None)))


def _told(value: Any) -> dict[str, Any]:
    """What `jax.jit` was told beside the function, as far as pickling shows it; of a cache, nothing.

    That is static and donated arguments, shardings and compiler options; not ``inline``, which changes no
    result. A version of JAX that pickles otherwise shows nothing, and its own number is part of the key.
    """
    state = value.__getstate__() if isinstance(value, _JITTED) and hasattr(value, "__getstate__") else None
    told = ("static_argnums", "static_argnames", "global_cache_key")
    return {name: state.get(name) for name in told} if isinstance(state, dict) else {}


def _plain(value: Any) -> Part:
    return Part((type(value).__name__, repr(value)))


def _sequence(value: Any) -> Part:
    return Part((type(value).__name__,), tuple(value))


def _unordered(value: Any) -> Part:
    return Part((type(value).__name__,), tuple(value), ordered=False)


def _mapping(value: Mapping[Any, Any]) -> Part:
    # A configuration is looked up by name; layers and stages may be called one after another.
    return Part(("mapping",), tuple(value.items()), ordered=any(map(callable, value.values())))


def _array(value: Any) -> Part:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Part(("key", str(value.dtype)), (jax.random.key_data(value),))
    array = np.asarray(value)
    if array.dtype.hasobject:
        return Part(("objects", array.shape), tuple(array.ravel().tolist()))
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    weak = ("weak",) if getattr(value, "weak_type", False) else ()
    return Part(("array", str(array.dtype), array.shape, content, array.nbytes, *weak))


def _partial(value: "functools.partial[Any]") -> Part:
    return Part(("partial",), (value.func, value.args, dict(value.keywords)))


def _builtin(value: Any) -> Part:
    owned = getattr(value, "__self__", None)
    if owned is None or isinstance(owned, types.ModuleType):
        return Part(("builtin", getattr(value, "__module__", None), value.__qualname__))
    return Part(("builtin", value.__qualname__), (owned,))


def _tree_definition(value: Any) -> Part:
    return Part(("tree", value.num_leaves), (value.node_data(), tuple(value.children())))


def _mesh(value: Mesh) -> Part:
    kinds = tuple(str(kind) for kind in value.axis_types or ())
    return Part(("mesh", tuple(value.axis_names), value.devices.shape, kinds), tuple(value.devices.flat))


def _object(value: Any) -> Part:
    """An instance: its type, its attributes, and its contents if it is a container."""
    kind = type(value)
    state = _state(value)
    contents = _contents(value)
    if not state and not contents and not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        contents = _opaque(value)
    return Part(("object",), (kind, state, contents))


def _contents(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return (dict(value),)
    if isinstance(value, (tuple, list, deque)):
        return tuple(value)
    if isinstance(value, (set, frozenset)):
        return (frozenset(value),)
    plain: tuple[type[Any], ...] = (int, float, complex, str, bytes)
    return next(((kind(value),) for kind in plain if isinstance(value, kind)), ())


_ALIKE = ("_thread", "threading", "_io")


def _opaque(value: Any) -> tuple[Any, ...]:
    """What an instance without attributes is: as it pickles, or as it prints."""
    kind = type(value)
    if kind is object or kind.__module__ in _ALIKE:
        return ()
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception:  # whatever the type raises where it cannot be pickled
        text = repr(value)
        if " at 0x" in text:
            raise FingerprintError(
                f"a model's code is described by content; {text[:200]} shows nothing but its address: pass "
                f"it as an argument, or give its type __reduce__"
            ) from None
        return (text,)
    if isinstance(reduced, str):
        return (reduced,)
    return tuple(part if index < 3 else tuple(part or ()) for index, part in enumerate(reduced))


def _state(value: Any) -> dict[str, Any]:
    """Attributes of an instance by name, without cached ones."""
    kind = type(value)
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            inner = name.startswith("__") and not name.endswith("__")
            mangled = f"_{base.__name__.lstrip('_')}{name}" if inner else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                found[name] = getattr(value, mangled)
    found.update(getattr(value, "__dict__", {}))
    return {name: one for name, one in found.items() if not _is_derived(kind, name, one)}


def _is_derived(kind: type, name: str, value: Any) -> bool:
    # Cached values come and go, and hashes of strings differ from process to process.
    if is_naming(name) or isinstance(getattr(kind, name, None), functools.cached_property):
        return True
    # Flax counts the Linen modules of a process, those too that other models make while they are traced.
    if type(value).__name__ == "FlaxId":
        return True
    return name.startswith("_") and "hash" in name and isinstance(value, (int, type(None)))


_EXACT: dict[type, Rule] = {
    **dict.fromkeys((bool, int, float, complex, str, bytes, slice, range), _plain),
    **dict.fromkeys((type(None), type(...), type(NotImplemented)), _plain),
    **dict.fromkeys((tuple, list), _sequence),
    **dict.fromkeys((set, frozenset), _unordered),
    **dict.fromkeys((dict, types.MappingProxyType), _mapping),
    Scoped: scoped_part,
    Used: used_part,
    types.CodeType: lambda one: scoped_part(Scoped(one, {})),
}
_RULES: tuple[tuple[tuple[type, ...], Rule], ...] = (
    ((enum.Enum,), lambda one: Part(("member", one.name), (one.value, type(one)))),
    ((np.generic, np.ndarray, jax.Array), _array),
    ((np.dtype,), lambda one: Part(("dtype", repr(one)))),
    ((jax.ShapeDtypeStruct,), lambda one: Part(("abstract", one.shape, str(one.dtype)), (one.sharding,))),
    ((jax.Device,), lambda one: Part(("device", one.platform, one.device_kind, one.id))),
    ((Mesh,), _mesh),
    ((NamedSharding,), lambda one: Part(("sharding", str(one.memory_kind)), (one.mesh, one.spec))),
    ((PartitionSpec,), lambda one: Part(("spec",), tuple(one))),
    ((Primitive,), lambda one: Part(("primitive", one.name))),
    ((jax.tree_util.PyTreeDef,), _tree_definition),
    ((functools.partial,), _partial),
    ((types.MethodType,), lambda one: Part(("method",), (one.__func__, one.__self__))),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    ((types.ModuleType,), module_part),
    ((property, functools.cached_property, classmethod, staticmethod), descriptor_part),
    ((types.MemberDescriptorType, types.GetSetDescriptorType), descriptor_part),
    ((types.WrapperDescriptorType, types.MethodDescriptorType), descriptor_part),
    ((types.ClassMethodDescriptorType,), descriptor_part),
    ((weakref.ref,), lambda one: Part(("weak",), (one(),))),
    ((logging.Logger,), lambda one: Part(("logger", one.name))),
    ((pathlib.PurePath,), lambda one: Part(("path", one.as_posix()))),
)
