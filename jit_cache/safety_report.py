"""What the padding-safety check found, and how it is told."""

from dataclasses import dataclass, field
from typing import Any

from ..bucketing import Bucket
from .signature import BATCH

_REMEDIES = {
    "size": "keep padding out of every sum, mean, norm, maximum and count by the mask or the lengths; "
    "pad convolutions by numbers, since with strides SAME pads by the size, and mask before each",
    "NaN": "take masked elements out with jnp.where before they are used: 0 x NaN is NaN",
    "junk": "take masked elements out with jnp.where before they are used",
    "order": "use the 'positions' input or a row's own data, never a row's place in the batch",
    "rows": "let no statistic, maximum, ranking or capacity run over the batch dim",
    "empty": "divide by jnp.maximum(count, 1), mask scores with a large finite number, or select",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer that padding, or a neighbour, changed.

    Attributes:
        axis: the axis whose padding did it.
        kind: ``size``, ``NaN``, ``junk``, ``order``, ``rows`` or ``empty``; decides the remedy.
        probe: what was done, in words.
        output: name of the output leaf.
        position: row in the batch, then the place in that row's output.
        difference: largest absolute difference; infinite where one side is not finite.
        allowed: largest difference that would have passed; 0 inside one bucket.
        bucket: where it was seen.
        source: the one input whose padding is enough to do it, where it is known.
    """

    axis: str
    kind: str
    probe: str
    output: str
    position: tuple[int, ...]
    difference: float
    allowed: float
    bucket: Bucket
    source: str | None = None

    @property
    def remedy(self) -> str:
        """What to change in the model."""
        return _REMEDIES[self.kind]

    def __str__(self) -> str:
        row, *place = self.position
        where = f"row {row}" + (f", place {place}" if place else "")
        if self.kind == "empty":
            moved = "is not finite"
        else:
            moved = f"moved by {self.difference:.3g} (allowed {self.allowed:.3g})"
        cause = f", caused by input {self.source!r}" if self.source else ""
        return f"output {self.output!r} at {where} {moved} in bucket {self.bucket}: {self.probe}{cause}"


@dataclass(slots=True)
class AxisSafety:
    """What the probes of one axis gave.

    Attributes:
        axis: its name; ``batch`` stands for spare rows and neighbours.
        probes: comparisons made.
        worst: largest difference between buckets that was allowed to pass.
        findings: at most one for each probe; none means that padding this axis is safe.
        notes: what could not be compared, and why.
        padded: whether the grid pads this axis at all; if not, nothing was probed.
    """

    axis: str
    probes: int = 0
    worst: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    padded: bool = True

    @property
    def ok(self) -> bool:
        """Whether the axis may be padded."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class SafetyReport:
    """The verdict on a servable, axis by axis.

    Attributes:
        model: the servable's name.
        axes: one verdict for each axis, ``batch`` first.
        tolerance: the relative tolerance that held between buckets.
        programs: how many buckets were compiled for it.
        seconds: how long it took.
        makes_mask: whether the servable declares a mask or lengths.
    """

    model: str
    axes: tuple[AxisSafety, ...]
    tolerance: float
    programs: int
    seconds: float
    makes_mask: bool

    @property
    def ok(self) -> bool:
        """Whether every axis may be padded."""
        return all(axis.ok for axis in self.axes)

    @property
    def refused(self) -> tuple[str, ...]:
        """The axes that must not be padded."""
        return tuple(axis.axis for axis in self.axes if not axis.ok)

    def __getitem__(self, axis: str) -> AxisSafety:
        return next(one for one in self.axes if one.axis == axis)

    def exact_options(self) -> dict[str, Any]:
        """Options of `Servable` with which a refused model can still be served: exact sizes, row by row.

        Rows of different sizes in one batch would pad each other, hence one row at a time.
        """
        if self.ok:
            return {}
        scheme = {axis: "exact" for axis in self.refused if axis != BATCH}
        return {"limits": {BATCH: 1}, "scheme": {BATCH: [1], **scheme}}

    def explain(self) -> str:
        """The verdict in words: what moved, which probe moved it, and what to do."""
        if self.ok:
            return (
                f"model {self.model!r}: padding changes no answer on {', '.join(a.axis for a in self.axes)}"
            )
        return "\n".join([self._refusal(axis) for axis in self.axes if not axis.ok] + [self._way_out()])

    def _refusal(self, axis: AxisSafety) -> str:
        first = axis.findings[0]
        remedies = list(dict.fromkeys(finding.remedy for finding in axis.findings))
        if not self.makes_mask and axis.axis != BATCH:
            remedies.insert(0, f"declare a mask, such as 'mask': 'mask[{axis.axis}]', and use it")
        more = len(axis.findings) - 1
        also = f" ({more} more probe{'s' * (more > 1)} moved it)" if more else ""
        return (
            f"padding must not change an answer; axis {axis.axis!r} of model {self.model!r} is refused: "
            f"{first}{also}. In the model: {'; '.join(remedies)}"
        )

    def _way_out(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.exact_options().items())
        text = (
            f"As it is, the model can be served at exact sizes, one row at a time: Servable(..., {options})"
        )
        if all(one.kind in ("NaN", "junk") for axis in self.axes for one in axis.findings):
            text += (
                ". With the declared pad values alone the answers are right; trust_pad=True, or "
                "`servax check --trust-pad`, accepts a model that tells padding by its value, and "
                "`servax serve --no-check-padding` serves it"
            )
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``servax check --json``."""
        return {
            "model": self.model,
            "ok": self.ok,
            "refused": list(self.refused),
            "tolerance": self.tolerance,
            "programs": self.programs,
            "seconds": round(self.seconds, 3),
            "exact_options": self.exact_options(),
            "axes": [
                {
                    "axis": axis.axis,
                    "ok": axis.ok,
                    "padded": axis.padded,
                    "probes": axis.probes,
                    "worst": axis.worst,
                    "notes": axis.notes,
                    "findings": [_finding_json(finding) for finding in axis.findings],
                }
                for axis in self.axes
            ],
        }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "probe": finding.probe,
        "output": finding.output,
        "position": list(finding.position),
        # JSON has no infinity.
        "difference": finding.difference if finding.difference < float("inf") else None,
        "allowed": finding.allowed,
        "bucket": str(finding.bucket),
        "input": finding.source,
        "remedy": finding.remedy,
    }
