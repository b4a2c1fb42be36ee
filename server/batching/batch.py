"""One batch on its way through the device: pad, launch, wait, cut the padding off. Device thread only."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...bucketing import Bucket
from ...jit_cache import Program, Staging, explain_sealed
from ...jit_cache.staging import Sample, full_batch
from ...jit_cache.step_program import CaseProgram, SteppedProgram, StepStaging
from ..errors import NanOutput
from ..hosting.model import Model
from .batcher import Launch
from .request import Row

Filled = Sequence[Row] | Sequence[Sample]
"""What a bucket is filled with."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one batch was, for metrics.

    Attributes:
        model: its model's name.
        bucket: where it ran.
        rows: real rows.
        real: real elements (product of each row's sizes, summed).
        computed: elements of the bucket.
        seconds: from launch to outputs on the host.
        reason: why it was launched: full, window, deadline or idle.
        queued_s: seconds that each row waited for the launch.
        cold: whether a smaller bucket of the servable's grid would have held it, but is not warm yet.
    """

    model: str
    bucket: Bucket
    rows: int
    real: int
    computed: int
    seconds: float
    reason: str
    queued_s: tuple[float, ...]
    cold: bool = False


class Flight:
    """One call of a program: of a static one for one batch, of a stepped one for a batch a step.

    Args:
        model: whose rows they are.
        program: what runs; with several batches a case of a stepped program.
        buckets: where each batch runs.
        rows: rows of each batch.
        now_s: time of the launch.

    Raises:
        Exception: whatever the program raises; nothing is held then.
    """

    __slots__ = (
        "_leaves",
        "_left",
        "_program",
        "_shares",
        "_staging",
        "launched_s",
        "model",
        "pad_s",
        "seconds",
        "steps",
    )

    def __init__(
        self,
        model: Model,
        program: Program,
        buckets: Sequence[Bucket],
        rows: Sequence[Filled],
        now_s: float,
    ) -> None:
        self.model, self.launched_s, self._program = model, now_s, program
        self.steps = self._left = len(buckets)
        self.seconds: float | None = None
        costs = [0.0, *itertools.accumulate(map(model.cost.seconds, buckets))]
        self._shares = [cost / costs[-1] if costs[-1] > 0 else 0.0 for cost in costs[:-1]] + [1.0]
        staging = self._staging = model.borrow_staging(program)
        try:
            self._leaves = self._launch(staging, buckets, rows)
        except BaseException as error:
            model.return_staging(program, staging)
            if isinstance(error, RuntimeError):
                with explain_sealed(f"model {model.name!r} in bucket {buckets[0]}"):
                    raise
            raise

    def _launch(
        self,
        staging: Staging | StepStaging,
        buckets: Sequence[Bucket],
        rows: Sequence[Filled],
    ) -> Sequence[Any]:
        begin_s = time.perf_counter()
        if isinstance(staging, Staging):
            inputs = staging.fill(*_filling(rows[0]))
            self.pad_s = time.perf_counter() - begin_s
            return self._program(inputs)
        for step, (bucket, some) in enumerate(zip(buckets, rows, strict=True)):
            staging.fill(step, bucket, *_filling(some))
        self.pad_s = time.perf_counter() - begin_s
        return _stepped(self._program)(staging.close(len(buckets)))

    def fetch(self, step: int, bucket: Bucket, rows: Filled) -> list[list[np.ndarray]]:
        """Wait for the device; outputs of each row of one batch. Once for each batch."""
        outputs, sizes = self.model.servable.outputs, [row.sizes for row in rows]
        try:
            if isinstance(self._staging, Staging):
                arrays = [np.asarray(leaf) for leaf in self._leaves]
                outputs.check_batch(arrays, bucket.rows)
                return self._staging.cut(outputs, arrays, sizes)
            return outputs.cut(_stepped(self._program).pieces(self._leaves, step, bucket), sizes)
        finally:
            self._left -= 1
            if not self._left:
                self.model.return_staging(self._program, self._staging)

    def span(self, step: int, now_s: float) -> tuple[float, float]:
        """When a batch's part of the call began and how many seconds it took; shared out by their costs.

        Args:
            step: which batch.
            now_s: when the first of them came back; later calls keep that.
        """
        if self.seconds is None:
            self.seconds = now_s - self.launched_s
        begin, end = (self.seconds * share for share in self._shares[step : step + 2])
        return self.launched_s + begin, end - begin


class Batch:
    """Rows in a bucket, launched when it is made.

    Args:
        model: whose rows they are.
        bucket: where they run.
        rows: at most as many as the bucket has; none for a run that nobody asked for, on a full batch.
        reason: why they run now.
        now_s: time of the launch.
        program: what runs; the model's for that bucket if None.
        flight: the call that holds them, if others share it; made here if None.
        step: which step of it they are.

    Raises:
        Exception: whatever the program raises; nothing is held then.
    """

    __slots__ = ("_filled", "_flight", "_step", "bucket", "launched_s", "model", "reason", "rows")

    def __init__(
        self,
        model: Model,
        bucket: Bucket,
        rows: Sequence[Row],
        reason: str,
        now_s: float,
        *,
        program: Program | None = None,
        flight: Flight | None = None,
        step: int = 0,
    ) -> None:
        self.model, self.bucket, self.rows, self.reason = model, bucket, rows, reason
        self.launched_s = now_s
        self._filled: Filled = rows or full_batch(model.servable.signature, bucket)
        if flight is None:
            program = model.cache.get(bucket) if program is None else program
            flight = Flight(model, program, (bucket,), (self._filled,), now_s)
        self._flight, self._step = flight, step

    @classmethod
    def together(cls, model: Model, launches: Sequence[Launch], now_s: float) -> "list[Batch]":
        """Launch several batches in one call of the stepped program that holds all their buckets.

        Raises:
            Exception: whatever the program raises; none of them is launched then.
        """
        buckets = [one.bucket for one in launches]
        flight = Flight(model, model.cache.get(buckets[0]), buckets, [one.rows for one in launches], now_s)
        return [
            cls(model, one.bucket, one.rows, one.reason, now_s, flight=flight, step=step)
            for step, one in enumerate(launches)
        ]

    @property
    def last(self) -> bool:
        """Whether no later batch shares its call."""
        return self._step == self._flight.steps - 1

    def fetch(self) -> list[list[np.ndarray]]:
        """Wait for the device; output arrays of each row, cut to its sizes. Once only.

        Raises:
            Exception: whatever the program raises; OutputError if the model returned another number of rows.
        """
        return self._flight.fetch(self._step, self.bucket, self._filled)

    @property
    def pad_s(self) -> float:
        """Seconds that padding took, of the whole call; for traces."""
        return self._flight.pad_s

    def span(self, now_s: float) -> tuple[float, float]:
        """When it began on the device and how many seconds it took, if it came back now."""
        return self._flight.span(self._step, now_s)

    def record(self, seconds: float) -> BatchRecord:
        """What it was, for metrics."""
        return BatchRecord(
            model=self.model.name,
            bucket=self.bucket,
            rows=len(self.rows),
            real=sum(math.prod(row.sizes) for row in self.rows),
            computed=self.bucket.elements,
            seconds=seconds,
            reason=self.reason,
            queued_s=tuple([self.launched_s - row.request.arrived_s for row in self.rows]),
            cold=not self.model.report.complete and self._cold(),
        )

    def _cold(self) -> bool:
        best = self.model.servable.grid.smallest(*self.model.box(self.bucket, self.rows))
        return best.elements < self.bucket.elements and best not in self.model.cache.ready()


def _filling(
    rows: Filled,
) -> tuple[list[Mapping[str, np.ndarray]], list[tuple[int, ...]]]:
    return [row.item for row in rows], [row.sizes for row in rows]


def _stepped(program: Program) -> SteppedProgram:
    if not isinstance(program, CaseProgram):
        raise TypeError(f"steps are run by a case of a stepped program; got {program!r}")
    return program.stepped


def nan_rows(outputs: Sequence[Sequence[np.ndarray]]) -> set[int]:
    """Which rows of a batch hold NaN in any output; integers cannot."""
    return {
        place
        for place, row in enumerate(outputs)
        if any(leaf.dtype.kind in "fcV" and np.isnan(leaf).any() for leaf in row)
    }


def nan_error(batch: Batch) -> NanOutput:
    """What the caller of such a row is told."""
    return NanOutput(
        f"an answer holds no NaN where outputs are checked; model {batch.model.name!r} answered this request "
        f"with NaN in bucket {batch.bucket}: check the input, or the model in higher precision"
    )
