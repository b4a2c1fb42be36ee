"""Compile all kernels for processors and systems of other kinds: a line for each, with what its code calls.

LLVM ends the process where it has no instructions for something.
"""

import json
import struct
import sys

import llvmlite.binding as llvm
from servax.models.native import kernel, paged_attention, self_attention
from servax.models.native.compiled import translated
from servax.models.native.element import FLOAT32, FOURS, WIDENED, brief
from servax.models.native.target import fitting

# Of a symbol in an object for Linux and for macOS: where its name is, what it is, where it is defined.
_ELF, _MACH_O = struct.Struct("<IBxHQQ"), struct.Struct("<IBBHQ")


def handlers(tile):
    """What this package tells XLA of on such a machine, and what it falls back to."""
    elements = {FLOAT32, brief(tile), WIDENED} | ({FOURS} if tile.fours else set())
    yield from (kernel.handler(tile, element) for element in sorted(elements))
    yield self_attention.handler(tile)
    yield from (paged_attention.handler(tile, dtype) for dtype in ("float32", "float16"))


def _named(data, start):
    return data[start : data.index(0, start)].decode()


def _of_elf(data):
    """Names of an ELF object that are defined elsewhere."""
    (sections,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    heads = [struct.unpack_from("<IIQQQQII", data, sections + 64 * i) for i in range(count)]
    for _, kind, _, _, start, size, link, _ in heads:
        if kind == 2:  # the table of symbols
            for name, _, section, *_ in _ELF.iter_unpack(data[start : start + size]):
                if name and not section:
                    yield _named(data, heads[link][4] + name)


def _of_mach_o(data):
    """Names of a Mach-O object that are defined elsewhere, without C's underscore."""
    (count,), place = struct.unpack_from("<I", data, 16), 32
    for _ in range(count):
        kind, size, start, symbols, names, _ = struct.unpack_from("<6I", data, place)
        if kind == 2:  # the table of symbols
            for name, kind_of, *_ in _MACH_O.iter_unpack(data[start : start + symbols * _MACH_O.size]):
                if kind_of & 0x0F == 1:
                    yield _named(data, names + name).removeprefix("_")
        place += size


def main(cases):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for triple, cpu, *features in cases:
        system = "darwin" if "darwin" in triple else "linux"
        tile = fitting(dict.fromkeys(features, True), triple.split("-", maxsplit=1)[0], system)
        for handler in handlers(tile):
            print(json.dumps({"triple": triple, "cpu": cpu, "target": handler.target}), flush=True)
            given = ",".join(f"+{feature}" for feature in features)
            module, machine = translated(handler, triple, cpu, given)
            read = _of_elf if system == "linux" else _of_mach_o
            print(json.dumps(sorted(read(machine.emit_object(module)))), flush=True)


main(json.loads(sys.argv[1]))
