"""What a Python code object does, without what it is called and where it was written.

Left out: the function's own name, file, line numbers, docstring, names of locals, and the names of the
globals it reads (their values count instead, so renaming a helper changes nothing). Kept: the bytecode,
constants, argument names, attribute names, imports.
"""

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

_GLOBAL_OPS = frozenset(
    {
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_FROM_DICT_OR_DEREF",
    }
)
# Which module the code stands in says nothing about what it does.
_MODULE_NAMES = frozenset({"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__"})
_DYNAMIC = frozenset({"getattr", "vars", "eval", "exec", "globals", "__import__", "import_module", "dir"})
_HAS_DOCSTRING = 0x4000000  # co_flags from Python 3.13 on


class Import(NamedTuple):
    """An import statement inside a function."""

    module: str
    level: int
    names: tuple[str, ...]


class Code(NamedTuple):
    """A code object taken apart.

    Attributes:
        skeleton: plain values that identify what it does, without constants and globals.
        constants: its constants in order; nested code objects among them.
        reads: names it looks up among globals and builtins.
        attributes: attribute names it uses, nested code included; tell which parts of a module it touches.
        dynamic: whether it looks names up at run time.
        imports: modules it imports.
    """

    skeleton: tuple[Any, ...]
    constants: tuple[Any, ...]
    reads: tuple[str, ...]
    attributes: frozenset[str]
    dynamic: bool
    imports: tuple[Import, ...]


@functools.lru_cache(maxsize=4096)
def take_apart(code: CodeType) -> Code:
    """Read a code object."""
    reads, other, imports = _names(code)
    arguments = code.co_argcount + code.co_kwonlyargcount
    arguments += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    skeleton = (
        code.co_code,
        code.co_exceptiontable,
        code.co_flags & ~_HAS_DOCSTRING,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_nlocals),
        code.co_varnames[:arguments],
        tuple(name if name in other else "" for name in code.co_names),
        (len(code.co_cellvars), len(code.co_freevars)),
    )
    constants = _constants(code)
    nested = [take_apart(one) for one in constants if isinstance(one, CodeType)]
    return Code(
        skeleton,
        constants,
        tuple(reads),
        frozenset(other).union(*(one.attributes for one in nested)),
        bool(_DYNAMIC & (reads.keys() | other)) or any(one.dynamic for one in nested),
        tuple(imports),
    )


def _names(code: CodeType) -> tuple[dict[str, None], set[str], list[Import]]:
    """Globals read, other names used, and imports, in the order of the bytecode."""
    reads: dict[str, None] = {}
    other: set[str] = set()
    imports: list[Import] = []
    before: list[Any] = [None, None]
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "STORE_NAME":
            other.add(name)  # a class body: the names are its attributes
        elif instruction.opname in _GLOBAL_OPS:
            if name not in _MODULE_NAMES:
                reads[name] = None
        elif instruction.opname == "IMPORT_NAME":
            level, names = before
            imports.append(Import(name, int(level or 0), tuple(names or ())))
            other.add(name)
        elif isinstance(name, str) and instruction.opcode in dis.hasname:
            other.add(name)
        before = [before[1], name]
    return reads, other, imports


def _constants(code: CodeType) -> tuple[Any, ...]:
    """Constants without the docstring and, for a class body, without its qualified name."""
    constants = code.co_consts
    if not constants or not isinstance(constants[0], str):
        return constants
    if sys.version_info >= (3, 13):
        documented = bool(code.co_flags & _HAS_DOCSTRING)
    else:
        documented = not code.co_name.startswith("<")
    class_body = not code.co_flags & inspect.CO_OPTIMIZED
    return (None, *constants[1:]) if documented or class_body else constants


def look_up(name: str, scope: Mapping[str, Any]) -> tuple[bool, Any]:
    """A global's value: (whether there is one, the value); builtins count."""
    if name in scope:
        return True, scope[name]
    if hasattr(builtins, name):
        return True, getattr(builtins, name)
    return False, None
