"""One batch on its way through the device: pad, launch, wait, cut the padding off. Device thread only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from ...bucketing import Bucket
from ...jit_cache import Staging, explain_sealed
from ..errors import NanOutput
from ..hosting.model import Model
from .request import Row


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


class Batch:
    """Rows in a bucket, launched when it is made.

    Args:
        model: whose rows they are.
        bucket: where they run.
        rows: at most as many as the bucket has; none for a run on padding only.
        reason: why they run now.
        now_s: time of the launch.

    Raises:
        Exception: whatever the program raises; nothing is held then.
    """

    __slots__ = ("_leaves", "_staging", "bucket", "launched_s", "model", "reason", "rows")

    def __init__(self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, now_s: float) -> None:
        self.model, self.bucket, self.rows, self.reason = model, bucket, rows, reason
        self.launched_s = now_s
        self._staging: Staging = model.borrow_staging(bucket)
        try:
            inputs = self._staging.fill([row.item for row in rows], [row.sizes for row in rows])
            self._leaves = _call(model, bucket, inputs)
        except BaseException:
            model.return_staging(bucket, self._staging)
            raise

    def fetch(self) -> list[list[np.ndarray]]:
        """Wait for the device; output arrays of each row, cut to its sizes. Once only.

        Raises:
            Exception: whatever the program raises; OutputError if the model returned another number of rows.
        """
        try:
            arrays = [np.asarray(leaf) for leaf in self._leaves]
            outputs = self.model.servable.outputs
            outputs.check_batch(arrays, self.bucket.rows)
            return outputs.cut(arrays, [row.sizes for row in self.rows])
        finally:
            self.model.return_staging(self.bucket, self._staging)

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
        largest = tuple(map(max, zip(*[row.sizes for row in self.rows], strict=True)))
        best = self.model.servable.grid.smallest(len(self.rows), largest)
        return best.elements < self.bucket.elements and best not in self.model.cache.ready()


def _call(model: Model, bucket: Bucket, inputs: Mapping[str, np.ndarray]) -> Sequence[jax.Array]:
    program = model.cache.get(bucket)
    try:
        return program(inputs)
    except RuntimeError:
        with explain_sealed(f"model {model.name!r} in bucket {bucket}"):
            raise


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
