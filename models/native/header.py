"""Where the fields of XLA's foreign-function structs lie, read from the C header that jaxlib brings.

Read and not written down here, so that a jaxlib with more fields, or others, moves the offsets with it; a
header that says something this reader does not know is refused, and servax multiplies without the kernel.
Derivation: the C rules for structs of integers and pointers on 64-bit platforms, where each field is aligned
to its size.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

from ..errors import KernelUnavailable

T = TypeVar("T")
_PREFIX = "XLA_FFI_"
_SIZES = {"size_t": 8, "int64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4}
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"struct (XLA_FFI_\w+) \{(.*?)\n\}", re.S)
_ENUM = re.compile(r"typedef enum \{(.*?)\} (XLA_FFI_\w+);", re.S)
_MACRO_FIELD = re.compile(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\)")
_FIELD = re.compile(r"(?:const |struct )*(\w+)\s*(\**)\s*(\w+)")


class Struct(NamedTuple):
    """Offsets of fields and the size of all, in bytes."""

    offsets: Mapping[str, int]
    size: int
    align: int


class Header(NamedTuple):
    """What a handler has to know of the interface.

    Attributes:
        structs: by name without `XLA_FFI_`.
        values: of enumerators, by name without `XLA_FFI_`.
        version: major and minor of the interface.
    """

    structs: Mapping[str, Struct]
    values: Mapping[str, int]
    version: tuple[int, int]

    def at(self, path: str) -> int:
        """The offset of `Struct.field` in bytes.

        Raises:
            KernelUnavailable: the header has no such field.
        """
        name, field = path.split(".")
        return _found(self.structs[name].offsets if name in self.structs else {}, field, f"the field {path}")

    def size(self, name: str) -> int:
        """The size of a struct in bytes.

        Raises:
            KernelUnavailable: the header has no such struct.
        """
        return _found(self.structs, name, f"the struct {name}").size

    def value(self, name: str) -> int:
        """The number of an enumerator.

        Raises:
            KernelUnavailable: the header has no such enumerator.
        """
        return _found(self.values, name, f"the enumerator {name}")


def _found(known: Mapping[str, T], name: str, what: str) -> T:
    if name not in known:
        raise KernelUnavailable(
            f"XLA's header must have {what}, got none of that name: this jaxlib is newer than the kernels of "
            "servax, which multiplies without them"
        )
    return known[name]


@functools.cache
def read() -> Header:
    """The header of the jaxlib in use.

    Raises:
        KernelUnavailable: there is none, or it is of another kind than this reader knows.
    """
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KernelUnavailable(f"jaxlib must bring {path.name}, got {error}: servax does without") from error


def parse(text: str) -> Header:
    """Layouts of the structs in a C header.

    Raises:
        KernelUnavailable: the interface has another major version than 0, or no version.
    """
    text = _COMMENT.sub("", text)
    version = tuple(
        int(found.group(1)) if (found := re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text)) else -1
        for part in ("MAJOR", "MINOR")
    )
    if version[0] != 0:
        raise KernelUnavailable(
            f"XLA's foreign-function interface must be of major version 0, got {version}: servax multiplies "
            "without its kernels"
        )
    sizes, values = dict(_SIZES), dict[str, int]()
    for body, name in _ENUM.findall(text):
        sizes[name] = 4
        values |= {key.removeprefix(_PREFIX): int(n) for key, n in re.findall(r"(\w+) = (\d+)", body)}
    for kind, name in re.findall(r"typedef (\w+) (XLA_FFI_\w+);", text):
        if kind in _SIZES:
            sizes[name] = _SIZES[kind]
    structs: dict[str, Struct] = {}
    for name, body in _STRUCT.findall(text):
        # A struct with a field of an unknown kind is left out, and missed only where it is needed.
        if (made := _struct(body, sizes, structs)) is not None:
            structs[name.removeprefix(_PREFIX)] = made
    return Header(structs, values, (version[0], version[1]))


def _struct(body: str, sizes: Mapping[str, int], known: Mapping[str, Struct]) -> Struct | None:
    offsets: dict[str, int] = {}
    place, widest = 0, 1
    for field in filter(None, (part.strip() for part in body.split(";"))):
        # The functions of the interface are fields that a macro declares.
        if macro := _MACRO_FIELD.search(field):
            size, align, name = 8, 8, macro.group(1).removeprefix(_PREFIX)
        else:
            if not (found := _FIELD.fullmatch(field)):
                return None
            kind, stars, name = found.groups()
            inner = known.get(kind.removeprefix(_PREFIX))
            if stars:
                size = align = 8
            elif inner is not None:
                size, align = inner.size, inner.align
            elif kind in sizes:
                size = align = sizes[kind]
            else:
                return None
        place = -(-place // align) * align
        offsets[name] = place
        place, widest = place + size, max(widest, align)
    return Struct(offsets, -(-place // widest) * widest, widest)
