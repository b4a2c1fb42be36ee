"""Functions, classes and modules taken apart; see `describe`."""

import dataclasses
import enum
import functools
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from .bytecode import Code, Import, look_up, take_apart
from .library import owner


class Part(NamedTuple):
    """A value taken apart by one step.

    Attributes:
        tag: what it is by itself; `repr` of it is the same in every process.
        children: what it is made of.
        ordered: whether the order of the children counts.
    """

    tag: tuple[Any, ...]
    children: tuple[Any, ...] = ()
    ordered: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Scoped:
    """A code object with the globals it reads; made here, so it has no identity of its own."""

    code: types.CodeType
    scope: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Used:
    """A module of the user's, as far as some code uses it."""

    module: types.ModuleType
    names: frozenset[str]
    whole: bool


def module_part(value: types.ModuleType) -> Part:
    """A module by itself: a library's by name, the user's by all it holds."""
    if (library := owner(value.__name__)) is not None:
        return Part(("module", library, value.__name__))
    return Part(("module",), (Used(value, frozenset(), True),))


def used_part(value: Used) -> Part:
    """Those attributes of a user's module that some code uses."""
    space = vars(value.module)
    if value.whole:
        names = [name for name in space if not (name.startswith("__") and name.endswith("__"))]
    else:
        names = [name for name in value.names if name in space]
    children = [(name, _part_of_module(space[name], value)) for name in names]
    return Part(("uses",), tuple(children), ordered=False)


def _part_of_module(found: Any, used: Used) -> Any:
    # A package's modules are looked into only as far as they are used, like the package itself.
    if isinstance(found, types.ModuleType) and owner(found.__name__) is None:
        return Used(found, used.names, False)
    return found


def scoped_part(value: Scoped) -> Part:
    """A code object: its skeleton, constants, globals and imports."""
    code = take_apart(value.code)
    children: list[Any] = [
        Scoped(one, value.scope) if isinstance(one, types.CodeType) else one for one in code.constants
    ]
    for name in code.reads:
        known, found = look_up(name, value.scope)
        children.append(_as_used(found, code) if known else ("unbound", name))
    children += [_imported(statement, value.scope, code) for statement in code.imports]
    return Part(("code", code.skeleton), tuple(children))


def _as_used(value: Any, code: Code) -> Any:
    if isinstance(value, types.ModuleType) and owner(value.__name__) is None:
        return Used(value, code.attributes, code.dynamic)
    return value


def _imported(statement: Import, scope: Mapping[str, Any], code: Code) -> Any:
    full = statement.module
    if statement.level:
        package = scope.get("__package__") or str(scope.get("__name__", "")).rpartition(".")[0]
        kept = package.split(".")[: package.count(".") + 2 - statement.level]
        full = ".".join([*kept, *filter(None, (statement.module,))])
    known = owner(full)
    if known is None:
        try:
            module = sys.modules.get(full) or importlib.import_module(full)
        except Exception:  # whatever a module raises when it is imported
            return ("missing", full)
        known = owner(full)
        if known is None:
            return Used(module, code.attributes | set(statement.names), code.dynamic)
    return ("import", known, full, statement.names)


def function_part(value: types.FunctionType) -> Part:
    """A function: its code, closure, defaults and attributes."""
    code = take_apart(value.__code__)
    cells = tuple(_as_used(_cell(cell), code) for cell in value.__closure__ or ())
    extras = {name: one for name, one in vars(value).items() if not is_naming(name)}
    module = value.__globals__.get("__name__")
    if (library := owner(module)) is not None:
        # A wrapper made by a library: what it wraps is in its closure.
        where = (library, module, value.__code__.co_qualname, value.__code__.co_firstlineno)
        return Part(("function", where), (cells, value.__defaults__, value.__kwdefaults__, extras))
    body = Scoped(value.__code__, value.__globals__)
    return Part(("function",), (body, cells, value.__defaults__, value.__kwdefaults__, extras))


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ("empty cell",)


_SKIPPED_IN_CLASS = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "_abc_impl"}
)
_SKIPPED_IN_CLASS |= {"__annotations__", "__abstractmethods__", "__firstlineno__", "__static_attributes__"}
_SKIPPED_IN_CLASS |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__"}
_SKIPPED_IN_CLASS |= {
    "__annotate_func__",
    "__annotations_cache__",
    "__orig_bases__",
    "__subclasshook__",
    "__repr__",
    "__str__",
}


def class_part(value: type) -> Part:
    """A class: its bases, members and field defaults."""
    if (library := owner(value.__module__)) is not None:
        return Part(("class", library, value.__module__, value.__qualname__))
    if issubclass(value, enum.Enum):
        return Part(("enum", value.__name__), tuple((one.name, one.value) for one in value), ordered=False)
    members = {
        name: one
        for name, one in vars(value).items()
        if name not in _SKIPPED_IN_CLASS and not _is_generated(one)
    }
    fields = vars(value).get("__dataclass_fields__", {})
    defaults = {name: (one.default, one.default_factory) for name, one in fields.items()}
    meta = type(value) if type(value) is not type else None
    return Part(("class", value.__name__), (value.__bases__, members, defaults, meta))


def _is_generated(value: Any) -> bool:
    # Methods that dataclasses and named tuples write: they follow from the fields.
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith("<string>")


def descriptor_part(value: Any) -> Part:
    """A property, a slot, a class or static method."""
    if isinstance(value, property):
        return Part(("property",), (value.fget, value.fset, value.fdel))
    if isinstance(value, functools.cached_property):
        return Part(("cached property",), (value.func,))
    if isinstance(value, (classmethod, staticmethod)):
        return Part((type(value).__name__,), (value.__func__,))
    return Part(("slot", value.__name__))


def is_naming(name: str) -> bool:
    """Whether an attribute only says what something is called."""
    return name in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__", "__annotations__")
