"""Arithmetic and memory traffic of HLO instructions, counted from their shapes.

`Compiled.cost_analysis` counts the body of a loop once, however often it runs, so a model with scanned
layers looks cheaper by the number of its layers; here a caller multiplies by the trip count.
"""

import math
import re

from .hlo import Computation, HloModule, Instruction

_NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain")
_NO_DATA = ("add-dependency", "opt-barrier", "partition-id", "replica-id", "get-dimension-size")
# The second half of an asynchronous pair: the first half launches.
_ENDS = ("async-done", "async-update", "copy-done", "send-done", "recv-done")
_COLLECTIVE_ENDS = ("all-reduce-done", "all-gather-done", "collective-permute-done")
FREE = frozenset((*_NO_WORK, *_NO_DATA, *_ENDS, *_COLLECTIVE_ENDS))
"""Opcodes that launch nothing."""
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter", "pad", "concatenate")
_LAYOUT = ("broadcast", "reshape", "transpose", "copy", "reverse", "iota", "convert", "bitcast-convert")
_CONTROL = (
    "while",
    "conditional",
    "call",
    "fusion",
    "custom-call",
    "copy-start",
    "async-start",
    "send",
    "recv",
)
_OTHER = ("select", "sort", "send", "recv", "rng-get-and-update-state", "infeed", "outfeed")
_MOVES = frozenset((*_SLICES, *_UPDATES, *_LAYOUT, *_CONTROL, *_OTHER))
_MATRIX_CALL = re.compile(r"gemm|matmul|cublas|dot|conv", re.IGNORECASE)


def is_matrix(one: Instruction) -> bool:
    """Whether it is a matrix product or a convolution, a library's included."""
    if one.opcode in ("dot", "convolution"):
        return True
    target = one.attribute("custom_call_target") if one.opcode == "custom-call" else None
    return target is not None and _MATRIX_CALL.search(target) is not None


def flops(one: Instruction, where: Computation) -> int:
    """Floating-point operations of one instruction, without those of computations it calls.

    A product of matrices counts 2 for each multiply-add, other arithmetic 1 an element; moving data is free.
    A custom call counts what it declares as an attribute `flops`, if it does.
    """
    if (declared := _declared(one, "flops")) is not None:
        return declared
    if one.opcode in FREE or (one.opcode in _MOVES and not is_matrix(one)):
        return 0
    if is_matrix(one):
        out = one.shapes[0].elements if one.shapes else 0
        return 2 * out * _contracted(one, where)
    if one.opcode in ("reduce", "reduce-window"):
        return max(one.elements, sum(_operand(where, name).elements for name in _arrays(one, where)[:1]))
    return one.elements


def _declared(one: Instruction, name: str) -> int | None:
    """A number among the attributes of a custom call of the foreign-function interface."""
    if one.opcode != "custom-call":
        return None
    found = re.search(rf"\b{name} = (\d+) : i64", one.attributes)
    return int(found[1]) if found else None


def _contracted(one: Instruction, where: Computation) -> int:
    """Elements that one element of a product sums over."""
    operands = _arrays(one, where)
    labels = re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
    if labels and len(operands) > 1:
        kernel = _operand(where, operands[1]).shapes[0].dims
        return math.prod(dim for dim, label in zip(kernel, labels[1], strict=False) if label != "o")
    dims = one.numbers("lhs_contracting_dims") or one.numbers("lhs_contracting_dimensions")
    if not operands or not _operand(where, operands[0]).shapes:
        return 1
    left = _operand(where, operands[0]).shapes[0].dims
    if not dims and one.opcode == "custom-call":
        dims = (len(left) - 1,)
    return math.prod(left[dim] for dim in dims if dim < len(left))


def traffic(one: Instruction, where: Computation, module: HloModule) -> int:
    """Bytes that one launch reads and writes, caches aside.

    Slices and gathers, also inside a fusion, read what they return and not the whole array; an update in
    place writes what it updates; a custom call moves what it declares as an attribute `bytes`, if it does.
    """
    if (declared := _declared(one, "bytes")) is not None:
        return declared
    called = module.called(one, where) if one.opcode == "fusion" else []
    if called:
        inner = called[0]
        read = sum(_read(inner, number, _operand(where, name)) for number, name in enumerate(one.operands))
        return read + _written(one, inner)
    if one.opcode in _SLICES:
        return 2 * one.nbytes
    if one.opcode == "dynamic-update-slice" and len(one.operands) > 1:
        return 2 * _operand(where, one.operands[1]).nbytes
    return one.nbytes + sum(_operand(where, name).nbytes for name in one.operands)


def _read(inner: Computation, number: int, given: Instruction) -> int:
    parameter = inner.parameters.get(number)
    if parameter is None:
        return given.nbytes
    return min(_read_of(inner, parameter), given.nbytes)


def _read_of(inner: Computation, source: Instruction) -> int:
    """Bytes that the users of an instruction need of it; never less than they take if all only slice."""
    total = 0
    for user in inner.users[source.name]:
        first = user.operands[0] == source.name
        if user.opcode in _SLICES and first:
            total += user.nbytes
        elif user.opcode == "bitcast":
            total += _read_of(inner, user)
        elif user.opcode != "dynamic-update-slice" or not first:
            return source.nbytes
    return total


def _written(one: Instruction, inner: Computation) -> int:
    root = inner.root
    if root is not None and root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
        return _operand(inner, root.operands[1]).nbytes
    return one.nbytes


_NOTHING = Instruction("", "constant", (), (), "", False)


def _operand(where: Computation, name: str) -> Instruction:
    return where.instructions.get(name, _NOTHING)


def _arrays(one: Instruction, where: Computation) -> list[str]:
    return [name for name in one.operands if _operand(where, name).shapes]
