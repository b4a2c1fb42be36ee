"""Reads the text of optimized HLO, as `jax.stages.Compiled.as_text` prints it.

Only what a report needs: computations, and for each instruction its opcode, shapes, operands and
attributes. A line that is not understood is kept apart and never an error, since the text is no stable
interface of XLA.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(?:\(.*)?\{\s*$")
_ASSIGN = re.compile(r"^(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.+)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,<=]*)\]")
_METADATA = re.compile(r"metadata=\{[^{}]*\}")
_NAME = re.compile(r"%?([\w.\-]+)\s*$")


@dataclass(frozen=True, slots=True)
class Shape:
    """Dtype, as HLO writes it, and dims of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, packed, without layout padding."""
        if self.dtype == "pred":
            return self.elements
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return math.ceil(self.elements * int(bits[1]) / 8) if bits else 0


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its computation.
        opcode: such as ``fusion`` or ``dynamic-slice``.
        shapes: one array, or those of a tuple, nested tuples flattened.
        operands: names of instructions of the same computation; empty for literals.
        attributes: what follows the operands, as text without metadata.
        root: whether it is what its computation returns.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of what it returns."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def elements(self) -> int:
        """Elements of what it returns."""
        return sum(shape.elements for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        """A plain attribute such as ``kind``, ``calls`` or ``custom_call_target``; None without it."""
        found = re.search(rf"(?:^|[\s,]){re.escape(name)}=(?:\"([^\"]*)\"|%?([\w.\-]+))", self.attributes)
        return (found[1] if found[1] is not None else found[2]) if found else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """An attribute such as ``dimensions={0,1}``, or ``"name":["0","1"]`` of a backend's configuration."""
        found = re.search(rf"\b{re.escape(name)}(?:=\{{|\":\[)([\d,\s\"]*)[}}\]]", self.attributes)
        return tuple(int(word) for word in re.findall(r"\d+", found[1])) if found else ()

    @property
    def called(self) -> tuple[str, ...]:
        """Computations it runs as a fusion, a call, a loop or a branch; not those applied to each element."""
        names = [self.attribute(key) for key in ("calls", "body", "true_computation", "false_computation")]
        if self.opcode in ("call", "async-start"):
            names.append(self.attribute("to_apply"))
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        listed = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        return (*(name for name in names if name is not None), *listed)

    @property
    def trip_count(self) -> int | None:
        """How often the body of a loop runs, where XLA knows."""
        found = re.search(r'"known_trip_count":\{"n":"?(\d+)', self.attributes)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Computation:
    """A list of instructions in order, by name; ``number`` counts computations as they are printed."""

    name: str
    instructions: dict[str, Instruction]
    entry: bool
    number: int

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @cached_property
    def root(self) -> Instruction | None:
        """What it returns: the instruction marked so, else the last."""
        marked = [one for one in self if one.root]
        return marked[0] if marked else next(reversed(self.instructions.values()), None)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The later instructions that read each name."""
        found: dict[str, list[Instruction]] = {}
        for one in self:
            for operand in dict.fromkeys(one.operands):
                if operand in found:
                    found[operand].append(one)
            found[one.name] = []
        return found

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        found = {}
        for one in self:
            if one.opcode == "parameter" and one.operands and one.operands[0].isdecimal():
                found[int(one.operands[0])] = one
        return found


@dataclass(frozen=True)
class HloModule:
    """All computations of a program by name, and the lines that were not understood."""

    computations: dict[str, Computation]
    unknown: tuple[str, ...]

    @property
    def entry(self) -> Computation | None:
        """Where a call begins; None in a text without computations."""
        marked = [one for one in self.computations.values() if one.entry]
        return marked[0] if marked else next(reversed(self.computations.values()), None)

    def called(self, one: Instruction, where: Computation) -> list[Computation]:
        """The computations that an instruction of ``where`` runs.

        A computation is printed after those it calls; calls that go forward come from damaged text, and
        following them might never end.
        """
        found = [self.computations[name] for name in one.called if name in self.computations]
        return [computation for computation in found if computation.number < where.number]


def parse_hlo(text: str) -> HloModule:
    """Read a module; never fails, see `HloModule.unknown`."""
    computations: dict[str, Computation] = {}
    unknown: list[str] = []
    current: Computation | None = None
    number = 0
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith(("HloModule", "//", "#")):
            continue
        if line.startswith("}"):
            current = None
            continue
        header = None if " = " in line.split("(", 1)[0] else _HEADER.match(line)
        if header is not None:
            number += 1
            current = Computation(header["name"], {}, bool(header["entry"]), number)
            computations[current.name] = current
            continue
        one = _instruction(line) if current is not None else None
        if one is None or current is None:
            # Outside a computation stand tables of source files, which are long and say nothing here.
            if current is not None:
                unknown.append(line)
            continue
        current.instructions[one.name] = one
    return HloModule(computations, tuple(unknown))


def _instruction(line: str) -> Instruction | None:
    match = _ASSIGN.match(line)
    if match is None:
        return None
    rest = match["rest"]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    if end <= 0:
        return None
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    last = _closing(rest, opcode.end() - 1)
    if last < 0:
        return None
    inside = rest[opcode.end() : last]
    return Instruction(
        match["name"],
        opcode["opcode"],
        tuple(_shapes(rest[:end])),
        tuple(_operands(opcode["opcode"], inside)),
        _METADATA.sub("", rest[last + 1 :]),
        bool(match["root"]),
    )


_DIGITS = re.compile(r"\d+")


def _shapes(text: str) -> Iterator[Shape]:
    for found in _SHAPE.finditer(text):
        yield Shape(found["dtype"], tuple(map(int, _DIGITS.findall(found["dims"]))))


def _operands(opcode: str, inside: str) -> Iterator[str]:
    if opcode == "constant":
        return
    depth, begin = 0, 0
    for place, letter in enumerate(inside + ","):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            # With shapes printed an operand reads 'f32[2]{0} %name'.
            if found := _NAME.search(inside[begin:place]):
                yield found[1]
            begin = place + 1


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at ``opening``, or -1."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    return -1
