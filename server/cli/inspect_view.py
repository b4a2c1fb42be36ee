"""How `servax inspect` and `servax check` show what they found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...bucketing import Bucket
from ...jit_cache import ProgramFacts
from ...jit_cache.fusion import FusionReport
from ...jit_cache.safety import SafetyReport


@dataclass(frozen=True, slots=True)
class Inspected:
    """One program: what it is made of, and how fast it runs here.

    Attributes:
        bucket: its sizes.
        facts: what the compiler said.
        report: its kernels.
        run_s: seconds of the fastest of several runs on a full batch.
        peak_flops_per_s: what this machine reaches in a large float32 matrix product.
    """

    bucket: Bucket
    facts: ProgramFacts
    report: FusionReport
    run_s: float
    peak_flops_per_s: float

    @property
    def flops_per_s(self) -> float:
        """Arithmetic reached in the run."""
        return self.report.flops / self.run_s

    @property
    def share_of_peak(self) -> float:
        """Of the machine's measured peak."""
        return self.flops_per_s / self.peak_flops_per_s

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bucket": str(self.bucket),
            "compile_s": round(self.facts.compile_s, 4),
            "run_s": self.run_s,
            "flops_per_s": self.flops_per_s,
            "peak_flops_per_s": self.peak_flops_per_s,
            "share_of_peak": self.share_of_peak,
            "temp_bytes": self.facts.temp_bytes,
            **self.report.to_json(),
        }


def print_programs(console: Console, model: str, programs: Sequence[Inspected], top: int) -> None:
    """A column for each program, then the fusions of each that save most."""
    table = Table(title=f"programs of {escape(model)}")
    table.add_column("bucket")
    for one in programs:
        table.add_column(str(one.bucket), justify="right")
    for heading, cell in _ROWS:
        table.add_row(heading, *(cell(one) for one in programs))
    console.print(table)
    for one in programs:
        if top and one.report.fusions:
            console.print(_fusions(one, top))
        _print_rest(console, one)


_ROWS: tuple[tuple[str, Callable[[Inspected], str]], ...] = (
    ("kernels a call", lambda one: str(one.report.launches)),
    ("without fusion", lambda one: str(one.report.unfused_kernels)),
    ("MB that stay inside fusions", lambda one: f"{one.report.saved_bytes / 1e6:.1f}"),
    ("MB read and written", lambda one: f"{one.report.bytes_accessed / 1e6:.1f}"),
    ("GFLOP", lambda one: f"{one.report.flops / 1e9:.3f}"),
    ("of it in matrix products", lambda one: f"{one.report.matrix_flops / max(1, one.report.flops):.1%}"),
    ("FLOP a byte", lambda one: f"{one.report.intensity:.1f}"),
    ("scratch MB", lambda one: f"{one.facts.temp_bytes / 1e6:.1f}"),
    ("compile s", lambda one: f"{one.facts.compile_s:.2f}"),
    ("run ms", lambda one: f"{one.run_s * 1e3:.2f}"),
    ("GFLOP/s", lambda one: f"{one.flops_per_s / 1e9:.1f}"),
    ("of the machine's matrix peak", lambda one: f"{one.share_of_peak:.0%}"),
)


def _fusions(one: Inspected, top: int) -> Table:
    shown, all_of_them = one.report.fusions[:top], len(one.report.fusions)
    more = f", {top} of {all_of_them}" if all_of_them > top else ""
    table = Table(title=f"fusions of {one.bucket}{more}, those that save most first")
    table.add_column("kind")
    table.add_column("launches", justify="right")
    table.add_column("kB saved", justify="right")
    table.add_column("operators")
    for fusion in shown:
        ranked = sorted(fusion.operators.items(), key=lambda item: -item[1])
        table.add_row(
            fusion.library or fusion.kind,
            str(fusion.launches),
            f"{fusion.saved_bytes / 1e3:.1f}",
            " ".join(name if count == 1 else f"{count}x{name}" for name, count in ranked),
        )
    return table


def _print_rest(console: Console, one: Inspected) -> None:
    report = one.report
    kernels = ", ".join(f"{count} {name}" for name, count in report.kernels.most_common())
    lines = [f"{one.bucket}: {kernels or 'no kernels'}; {report.matrix_products} matrix products"]
    if report.libraries:
        calls = ", ".join(f"{count} {name}" for name, count in report.libraries.most_common())
        lines.append(f"library calls: {calls}")
    if unknown := [name for name, count in report.loops.items() if count is None]:
        lines.append(f"loops of unknown length, counted once: {', '.join(unknown)}")
    if report.unknown_lines:
        lines.append(f"{len(report.unknown_lines)} lines of the program's text were not understood")
    console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def print_safety(console: Console, report: SafetyReport) -> None:
    """One line for each axis, then in words what moved and what to do."""
    table = Table(
        title=f"padding of {escape(report.model)}",
        caption=f"{report.programs} programs compiled and probed in {report.seconds:.1f} s",
    )
    table.add_column("axis")
    table.add_column("verdict")
    for heading in ("probes", "between buckets", "largest move"):
        table.add_column(heading, justify="right")
    for axis in report.axes:
        moves = [finding.difference for finding in axis.findings]
        moves = [move for move in moves if move < float("inf")] or moves
        verdict = "[green]safe[/]" if axis.ok else "[red]refused[/]"
        table.add_row(
            escape(axis.axis),
            verdict if axis.padded else "never padded",
            str(axis.probes),
            f"{axis.worst:.1e}",
            f"{max(moves):.3g}" if moves else "-",
        )
    console.print(table)
    for axis in report.axes:
        for note in axis.notes:
            console.print(f"{axis.axis}: {note}", markup=False, highlight=False, soft_wrap=True)
    if not report.ok:
        console.print(report.explain(), markup=False, highlight=False, soft_wrap=True)
