"""The probes of the padding-safety check: pairs of runs that must agree.

Each axis is probed alone, the others at exact size, so that one fault is blamed on one axis. The batch is
an axis like any other: its padding is spare rows. At last all axes are padded at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..bucketing import Bucket
from .errors import CompileError, InputError, OutputError
from .safety_cases import Bench, Filler, Item, Ran
from .safety_compare import compare, is_finite, is_nan
from .safety_report import AxisSafety, Finding
from .signature import BATCH

# Small sizes: a fault shows in any, and what costs is compiling. From 8 up most convolutions fit.
_ROWS, _MANY_ROWS, _SIZE = 4, 32, 8


class Probes:
    """One check: the sizes it uses, the probes and what they found."""

    def __init__(self, bench: Bench, tolerance: float, fillers: Sequence[Filler]) -> None:
        self.bench = bench
        self.tolerance = tolerance
        # A sum over devices may begin at another one for another row.
        self._same_bucket = tolerance if len(bench.servable.devices or ()) > 1 else None
        self.fillers = fillers
        self.grid = bench.servable.grid
        self.names = [leaf.name for leaf in bench.servable.outputs.leaves]
        rows = self.grid.rungs(BATCH)
        self.rows = _at_least(rows, _ROWS)
        self.many_rows = max([rung for rung in rows if rung <= _MANY_ROWS], default=self.rows)
        self.padded = {axis: _at_least(self.grid.rungs(axis), _SIZE) for axis in self.grid.item_axes}
        self.exact = {axis: _part(size) for axis, size in self.padded.items()}
        self.reference: Ran | None = None

    def bucket(self, rows: int, sizes: Mapping[str, int] | None = None) -> Bucket:
        """A bucket with exact sizes but for those given."""
        chosen = {**self.exact, **(sizes or {})}
        return Bucket(self.grid.axes, (rows, *(chosen[axis] for axis in self.grid.item_axes)))

    def items(self, count: int, sizes: Mapping[str, int] | None = None, first: int = 0) -> list[Item]:
        """Items of exact sizes but for those given."""
        chosen = {**self.exact, **(sizes or {})}
        wanted = [chosen[axis] for axis in self.grid.item_axes]
        return [self.bench.item(first + number, wanted) for number in range(count)]

    def all_axes(self) -> tuple[AxisSafety, ...]:
        """The verdict on every axis."""
        verdicts = {axis: AxisSafety(axis, padded=self._pads(axis)) for axis in self.grid.axes}
        if any(verdict.padded for verdict in verdicts.values()):
            self._find_reference()
        if verdicts[BATCH].padded:
            self._batch(verdicts[BATCH])
        items = {axis: verdicts[axis] for axis in self.grid.item_axes if verdicts[axis].padded}
        for verdict in items.values():
            self._axis(verdict)
        if items and all(verdict.ok for verdict in verdicts.values()):
            self._together(items, verdicts[BATCH])
        return tuple(verdicts.values())

    def _pads(self, axis: str) -> bool:
        """Whether the grid ever pads an axis: exact sizes one row at a time do not."""
        if axis == BATCH:
            return self.grid.max_rows > 1
        rungs = self.grid.rungs(axis)
        return self.grid.max_rows > 1 or rungs != tuple(range(1, rungs[-1] + 1))

    def _find_reference(self) -> None:
        """Run full rows at exact sizes; where those do not compile, take rungs for exact sizes."""
        try:
            self.bench.program(self.bucket(self.rows))
        except (CompileError, OutputError):
            for axis in self.grid.item_axes:
                rungs = self.grid.rungs(axis)
                self.exact[axis] = min(self.padded[axis], rungs[0])
                self.padded[axis] = next((rung for rung in rungs if rung > rungs[0]), rungs[0])
        full = self.bench.run(self.bucket(self.rows), self.items(self.rows))
        if _has_nan(full) and self.bench.narrow():
            full = self.bench.run(self.bucket(self.rows), self.items(self.rows))
        if _has_nan(full):
            raise InputError(
                f"a check needs items to which the model answers with numbers; {self.bench.servable.name!r} "
                f"answered NaN in bucket {full.bucket}: pass items=[...], or the vocabulary, such as "
                f"ids_below={{'ids': 30522}}"
            )
        self.reference = full

    def _alone(self) -> Bucket:
        """One row at exact size, or the fewest rows that compile."""
        try:
            self.bench.program(self.bucket(1))
        except (CompileError, OutputError):
            return self.bucket(self.grid.rungs(BATCH)[0])
        return self.bucket(1)

    def _full(self) -> Ran:
        if self.reference is None:
            raise InputError("the reference is run before the probes")
        return self.reference

    def _batch(self, verdict: AxisSafety) -> None:
        """Spare rows, neighbours and order; item axes at exact size, so nothing else is padding."""
        full, count = self._full(), self.rows
        bucket, items = full.bucket, self.items(count)
        if count > 1:
            alone = self._alone()
            for row in range(count):
                single = self.bench.run(alone, [items[row]])
                words = "a full batch against the row alone"
                self._agree(verdict, "rows", words, full, single, [(row, 0)], self.tolerance)
            order = [*range(1, count), 0]
            mixed = self.bench.run(bucket, [items[place] for place in order])
            self._agree(verdict, "order", "the same rows in another order", mixed, full, [*enumerate(order)])
            for row in (0, count - 1):
                others: list[Item] = self.items(count, first=1000 + row)
                others[row] = items[row]
                beside = self.bench.run(bucket, others)
                self._agree(verdict, "rows", "other neighbours in the batch", beside, full, [(row, row)])
            for row in range(count):
                lonely = self.bench.run(bucket, [items[row]])
                self._agree(verdict, "rows", "spare rows in place of neighbours", lonely, full, [(0, row)])
            self._junk(verdict, self.bench.run(bucket, items[:1]), items[:1], "spare rows")
        self._empty(verdict, bucket)
        if self.many_rows > count:
            crowd = self.bench.run(self.bucket(self.many_rows), items[:1])
            self._agree(verdict, "rows", "one row in a larger batch", crowd, full, [(0, 0)], self.tolerance)

    def _axis(self, verdict: AxisSafety) -> None:
        """Padding on one item axis, every row real and of the same size."""
        axis = verdict.axis
        small, size = self.exact[axis], self.padded[axis]
        compared = small < size
        if not compared:
            small = _part(size)
            verdict.notes.append(f"padding was not compared with exact size: only {size} compiles")
        items = self.items(self.rows, {axis: small})
        every = [(row, row) for row in range(self.rows)]
        padded = self.bench.run(self.bucket(self.rows, {axis: size}), items)
        if compared:
            words = f"size {small} padded to {size}"
            self._agree(verdict, "size", words, padded, self._full(), every, self.tolerance)
        self._junk(verdict, padded, items, f"the padding of size {small} to {size}")
        larger = next((rung for rung in self.grid.rungs(axis) if rung > size), None)
        if larger is not None:
            wide = self.bench.run(self.bucket(self.rows, {axis: larger}), items)
            words = f"size {small} padded to {larger} in place of {size}"
            self._agree(verdict, "size", words, wide, padded, every, self.tolerance)

    def _together(self, items: Mapping[str, AxisSafety], batch: AxisSafety) -> None:
        """Rows of several sizes in one batch, every axis padded; blamed on all axes of the items."""
        padded = {axis: self.padded[axis] for axis in items}
        sizes = [{}, padded, {axis: _part(self.exact[axis]) for axis in items}]
        mixed = [self.items(1, size, first=row)[0] for row, size in enumerate(sizes[: self.rows])]
        bucket = self.bucket(self.rows, padded)
        together = self.bench.run(bucket, mixed)
        for row, item in enumerate(mixed):
            lonely = self.bench.run(bucket, [item])
            self._agree(batch, "rows", "a neighbour of another size", together, lonely, [(row, 0)])
        if not batch.ok:
            return
        joint = AxisSafety("")
        if all(self.exact[axis] < self.padded[axis] for axis in items):
            words = f"{', '.join(items)} and spare rows padded at once"
            self._agree(joint, "size", words, together, self._full(), [(0, 0)], self.tolerance)
        self._junk(joint, together, mixed, "all padding")
        for axis, verdict in items.items():
            verdict.probes += joint.probes
            verdict.worst = max(verdict.worst, joint.worst)
            verdict.findings += [replace(finding, axis=axis) for finding in joint.findings]

    def _junk(self, verdict: AxisSafety, clean: Ran, items: Sequence[Item], where: str) -> None:
        """The same run with junk in place of the pad value; equal in every value."""
        every = [(row, row) for row in range(len(items))]
        for filler in self.fillers:
            kind = "NaN" if filler is Filler.NAN else "junk"
            dirty, source = self.bench.run(clean.bucket, items, filler), None
            if any(map(compare, dirty.rows, clean.rows)):
                dirty, source = self._source(clean, items, filler, dirty)
            words = f"{where} filled with {filler.value}"
            self._agree(verdict, kind, words, dirty, clean, every, source=source)

    def _source(
        self, clean: Ran, items: Sequence[Item], filler: Filler, dirty: Ran
    ) -> tuple[Ran, str | None]:
        """The one input whose junk is enough to move something, if there is one."""
        for name in self.bench.sources():
            single = self.bench.run(clean.bucket, items, filler, only=name)
            if any(map(compare, single.rows, clean.rows)):
                return single, name
        return dirty, None

    def _agree(
        self,
        verdict: AxisSafety,
        kind: str,
        probe: str,
        got: Ran,
        want: Ran,
        pairs: Sequence[tuple[int, int]],
        tolerance: float | None = None,
        source: str | None = None,
    ) -> None:
        """Compare pairs of rows of two runs; the first one beyond the tolerance is the probe's finding."""
        tolerance = self._same_bucket if tolerance is None else tolerance
        for row, other in pairs:
            verdict.probes += 1
            moved = compare(got.rows[row], want.rows[other], tolerance)
            if moved is None:
                continue
            if not moved.outside:
                verdict.worst = max(verdict.worst, moved.difference)
            elif all(finding.probe != probe for finding in verdict.findings):
                name, place = self.names[moved.leaf], (row, *moved.place)
                sizes = moved.difference, moved.allowed
                verdict.findings.append(
                    Finding(verdict.axis, kind, probe, name, place, *sizes, got.bucket, source)
                )

    def _empty(self, verdict: AxisSafety, bucket: Bucket) -> None:
        """A batch of padding only; infinities pass in an output that has them for real rows too."""
        empty = self.bench.run(bucket, [])
        for index, leaf in enumerate(empty.whole):
            verdict.probes += 1
            bad = ~is_finite(leaf) if is_finite(self._full().whole[index]).all() else is_nan(leaf)
            if bad.any():
                place = tuple(map(int, np.unravel_index(int(bad.argmax()), bad.shape)))
                words = "a batch of padding only"
                verdict.findings.append(
                    Finding(BATCH, "empty", words, self.names[index], place, float("inf"), 0.0, bucket)
                )


def _part(size: int) -> int:
    """A size that fills a rung by little more than half; odd for a power of two."""
    return size // 2 + 1 if size > 1 else 1


def _at_least(rungs: Sequence[int], size: int) -> int:
    return next((rung for rung in rungs if rung >= size), rungs[-1])


def _has_nan(ran: Ran) -> bool:
    return any(bool(is_nan(leaf).any()) for rows in ran.rows for leaf in rows)
