"""What XLA made of a program: which operators it clustered into which kernels, and what that saves.

Read from the optimized HLO. Clustering saves memory traffic: an intermediate inside a fusion stays in
registers or cache, where the unfused graph would write it out (and read it back).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .hlo import Computation, HloModule, Instruction, parse_hlo
from .hlo_cost import FREE, flops, is_matrix, traffic


@dataclass(frozen=True, slots=True)
class Fusion:
    """One cluster of operators that runs as one kernel.

    Attributes:
        name: of the instruction.
        kind: as XLA calls it: ``kLoop``, ``kInput``, ``kOutput``, ``kCustom``.
        library: which library or code generator takes it, for ``kCustom``; else None.
        operators: opcodes inside it, with how many of each.
        launches: how often one call of the program runs it.
        saved_bytes: size of the intermediates that stay inside, for one launch.
        flops: of one launch.
    """

    name: str
    kind: str
    library: str | None
    operators: Mapping[str, int]
    launches: int
    saved_bytes: int
    flops: int


@dataclass(slots=True)
class FusionReport:
    """A program's kernels, counted for one call.

    Attributes:
        fusions: those that save most first.
        kernels: launches by opcode; a fusion counts as one.
        libraries: launches of library calls by target or code generator.
        matrix_products: launches of dots and convolutions, those inside fusions included.
        flops: all arithmetic, loops counted as often as they run.
        matrix_flops: the part of it in matrix products and convolutions.
        bytes_accessed: bytes read and written by all kernels, caches aside.
        loops: trip count of each loop that runs; None where XLA does not know it (then counted once).
        unknown_lines: lines of the HLO text that were not understood.
        reported_flops: what the compiler's own cost analysis says, which counts a loop's body once; 0 where
            there is none.
    """

    fusions: list[Fusion] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    libraries: Counter[str] = field(default_factory=Counter)
    matrix_products: int = 0
    flops: int = 0
    matrix_flops: int = 0
    bytes_accessed: int = 0
    loops: dict[str, int | None] = field(default_factory=dict)
    unknown_lines: tuple[str, ...] = ()
    reported_flops: float = 0.0

    @property
    def launches(self) -> int:
        """Kernels launched by one call."""
        return self.kernels.total()

    @property
    def unfused_kernels(self) -> int:
        """Kernels that one call would launch without fusion: one for each operator."""
        inside = sum(one.launches * sum(one.operators.values()) for one in self.fusions)
        return self.launches - self.kernels["fusion"] + inside

    @property
    def saved_bytes(self) -> int:
        """Size of all intermediates that one call keeps inside fusions."""
        return sum(one.launches * one.saved_bytes for one in self.fusions)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: flops for each byte accessed."""
        return self.flops / self.bytes_accessed if self.bytes_accessed else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``servax inspect --json``."""
        return {
            "kernels": self.launches,
            "unfused_kernels": self.unfused_kernels,
            "kernels_by_opcode": dict(self.kernels.most_common()),
            "libraries": dict(self.libraries.most_common()),
            "matrix_products": self.matrix_products,
            "flops": self.flops,
            "matrix_flops": self.matrix_flops,
            "reported_flops": self.reported_flops,
            "bytes_accessed": self.bytes_accessed,
            "saved_bytes": self.saved_bytes,
            "intensity": self.intensity,
            "loops": self.loops,
            "unknown_lines": len(self.unknown_lines),
            "fusions": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "library": one.library,
                    "operators": dict(one.operators),
                    "launches": one.launches,
                    "saved_bytes": one.saved_bytes,
                    "flops": one.flops,
                }
                for one in self.fusions
            ],
        }


def inspect_program(program: Any) -> FusionReport:
    """Report on a compiled program.

    Args:
        program: a `Program`, or anything with ``as_text()`` such as `jax.stages.Compiled`.
    """
    compiled = getattr(program, "executable", program)
    report = analyse(compiled.as_text() or "")
    cost = compiled.cost_analysis() if hasattr(compiled, "cost_analysis") else None
    if isinstance(cost, list):
        cost = cost[0] if cost else None
    report.reported_flops = float((cost or {}).get("flops", 0.0))
    return report


def analyse(text: str) -> FusionReport:
    """Report on the text of an optimized HLO module."""
    module = parse_hlo(text)
    report = FusionReport(unknown_lines=module.unknown)
    if module.entry is not None:
        _walk(module.entry, 1, module, report)
    report.fusions.sort(key=lambda one: one.saved_bytes * one.launches, reverse=True)
    return report


def _walk(where: Computation, times: int, module: HloModule, report: FusionReport) -> None:
    """Count what a computation launches when it runs ``times`` times."""
    for one in where:
        if one.opcode in FREE:
            continue
        inner = module.called(one, where)
        if one.opcode == "while":
            report.loops[one.name] = one.trip_count
            for body in inner:
                _walk(body, times * (1 if one.trip_count is None else one.trip_count), module, report)
        elif one.opcode == "conditional":
            _add_dearest(inner, times, module, report)
        elif one.opcode in ("call", "async-start") and inner:
            for called in inner:
                _walk(called, times, module, report)
        else:
            _launch(one, where, inner, times, module, report)


def _add_dearest(branches: list[Computation], times: int, module: HloModule, report: FusionReport) -> None:
    """Of several branches one runs; the one with most arithmetic stands for all."""
    costs = []
    for branch in branches:
        alone = FusionReport()
        _walk(branch, 1, module, alone)
        costs.append((alone.flops, alone.launches))
    if costs:
        _walk(branches[costs.index(max(costs))], times, module, report)


def _launch(
    one: Instruction,
    where: Computation,
    inner: list[Computation],
    times: int,
    module: HloModule,
    report: FusionReport,
) -> None:
    report.kernels[one.opcode] += times
    report.bytes_accessed += times * traffic(one, where, module)
    library = _library(one)
    if library is not None:
        report.libraries[library] += times
    if one.opcode == "fusion" and inner:
        total, matrix, products = _inside(inner[0], module)
        operators = _operators(inner[0], module)
        saved = _saved(inner[0], module)
        report.fusions.append(
            Fusion(one.name, one.attribute("kind") or "", library, operators, times, saved, total)
        )
    else:
        total = flops(one, where)
        matrix, products = (total, 1) if is_matrix(one) else (0, 0)
    report.flops += times * total
    report.matrix_flops += times * matrix
    report.matrix_products += times * products


def _library(one: Instruction) -> str | None:
    if one.opcode == "custom-call":
        return one.attribute("custom_call_target")
    if one.attribute("kind") != "kCustom":
        return None
    _, found, rest = one.attributes.partition('"kind":"')
    return rest.split('"', 1)[0].strip("_") if found else "custom"


def _inside(where: Computation, module: HloModule) -> tuple[int, int, int]:
    """Flops, matrix flops and matrix products of a fused computation, nested ones included."""
    total = matrix = products = 0
    for one in where:
        mine = flops(one, where)
        total += mine
        if is_matrix(one):
            matrix += mine
            products += 1
        for inner in module.called(one, where):
            parts = _inside(inner, module)
            total, matrix, products = total + parts[0], matrix + parts[1], products + parts[2]
    return total, matrix, products


def _operators(where: Computation, module: HloModule) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in where:
        inner = module.called(one, where)
        for called in inner:
            found += _operators(called, module)
        if not inner and one.opcode not in FREE:
            found[one.opcode] += 1
    return found


def _saved(where: Computation, module: HloModule) -> int:
    """Bytes of what is computed inside and not returned."""
    returned = _returned(where)
    total = 0
    for one in where:
        total += sum(_saved(inner, module) for inner in module.called(one, where))
        if one.opcode not in FREE and one.name not in returned:
            total += one.nbytes
    return total


def _returned(where: Computation) -> set[str]:
    """Names whose memory a computation returns: its root, seen through tuples and bitcasts."""
    found: set[str] = set()
    waiting = [where.root.name] if where.root is not None else []
    while waiting:
        name = waiting.pop()
        one = where.instructions.get(name)
        if one is not None and name not in found:
            found.add(name)
            waiting += one.operands if one.opcode in FREE else ()
    return found
