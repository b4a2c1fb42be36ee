"""What becomes of a batch that failed. Device thread only.

A model's error: the rows are halved until the culprit is alone. The device out of memory: once more, in
halves. The device failed: the same rows again, a few times within their deadlines; if they still fail, a run
of nobody's rows tells whether the rows or the device are to blame.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from ...bucketing import Bucket
from ...jit_cache import OutputError, SealedError
from ..errors import ModelError
from ..hosting.model import Model
from .batch import Batch
from .batcher import Launch
from .clock import Clock
from .dispatcher import Dispatcher
from .faults import Fault, FaultPolicy, FaultRecord, device_error, fault_of, first_line
from .request import Row
from .work import Rerun

_log = logging.getLogger("servax.device")

Report = Callable[[Batch, list[list[np.ndarray]]], None]


class Recovery:
    """Gives every row of a failed batch its answer or its error.

    Args:
        dispatcher: where errors go.
        clock: source of time.
        policy: how often what is tried again.
        report: hands in the outputs of a batch that worked.
        device: index of the device.
        devices: how many there are; what one fails on is run on the others.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Clock,
        policy: FaultPolicy,
        report: Report,
        device: int = 0,
        devices: int = 1,
    ) -> None:
        self._dispatcher, self._clock, self._policy, self._report = dispatcher, clock, policy, report
        self._device = device
        self._others = self._left = devices - 1
        self._last: tuple[Model, Bucket] | None = None
        self.on_fault: Callable[[FaultRecord], None] | None = None

    def recover(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        """Answer or fail the rows of a batch that raised an error."""
        self._left = self._others
        self._recover(model, bucket, rows, reason, error)

    def rerun(self, model: Model, job: Rerun) -> None:
        """Run what failed on another device."""
        self._left = job.left
        bucket, rows, reason = job.launch.bucket, self._wanted(job.rows), job.launch.reason
        error = self._run(model, bucket, rows, reason) if rows else None
        if error is not None:
            self._recover(model, bucket, rows, reason, error)

    def _recover(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        if isinstance(error, SealedError) and bucket not in model.grid:
            # Another device's thread put another grid in place between the choice and the launch.
            smaller = model.smallest(bucket, rows)
            again = self._run(model, smaller, rows, reason)
            if again is None:
                return
            bucket, error = smaller, again
        fault = fault_of(error)
        if fault is Fault.MODEL:
            self._isolate(model, bucket, rows, reason, error)
        elif fault is Fault.MEMORY:
            self._halve(model, bucket, rows, reason, error)
        else:
            self._retry(model, bucket, rows, reason, error)

    def try_device(self) -> None:
        """Run padding in the bucket that failed last, to see whether the device works again."""
        if self._last is None:
            return
        model, bucket = self._last
        cause = self._nobodys(model, bucket)
        if cause is None:
            self.worked(model, bucket)
        else:
            self._dispatcher.device_failed(first_line(cause), self._device)
            gone = self._dispatcher.devices[self._device].breaker.gone
            self._tell(model, bucket, fault_of(cause), "gone" if gone else "trial", cause)

    def worked(self, model: Model, bucket: Bucket) -> None:
        """A run came back with answers."""
        if self._dispatcher.device_worked(self._device):
            self._tell(model, bucket, Fault.TRANSIENT, "closed")

    def _run(self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str) -> Exception | None:
        try:
            batch = Batch(model, bucket, rows, reason, self._clock.now())
            outputs = batch.fetch()
        except Exception as error:
            return error
        self._report(batch, outputs)
        return None

    def _nobodys(self, model: Model, bucket: Bucket) -> Exception | None:
        try:
            Batch(model, bucket, (), "trial", self._clock.now()).fetch()
        except Exception as error:
            return error
        return None

    def _retry(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        for _ in range(0 if self._dispatcher.broken(self._device) else self._policy.retries):
            rows = self._wanted(rows)
            if not rows:
                return
            self._tell(model, bucket, Fault.TRANSIENT, "retried", error)
            again = self._run(model, bucket, rows, reason)
            if again is None:
                return
            error = again
            if fault_of(error) is not Fault.TRANSIENT:
                self._recover(model, bucket, rows, reason, error)
                return
        if not self._dispatcher.broken(self._device) and self._nobodys(model, bucket) is None:
            self._tell(model, bucket, Fault.TRANSIENT, "blamed", error)
            self._isolate(model, bucket, rows, reason, error)
        else:
            self._give_up(model, bucket, rows, reason, error)

    def _give_up(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        """The device is to blame: have another one run the rows, or tell their callers."""
        job = Rerun(model.lane, Launch(bucket, tuple(rows), reason), self._left - 1)
        if self._left and self._dispatcher.hand_over(job, self._device):
            self._note(model, bucket, Fault.TRANSIENT, error, "moved")
        else:
            self._fail(model, bucket, rows, Fault.TRANSIENT, error)

    def _wanted(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Rows that somebody still waits for; the others are through."""
        self._dispatcher.expire()
        over = [row for row in rows if row.request.over]
        if over:
            self._dispatcher.finish(over, [[] for _ in over], self._device)
        return [row for row in rows if row not in over]

    def _halve(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        middle = len(rows) // 2
        if not middle:
            self._fail(model, bucket, rows, Fault.MEMORY, error)
            return
        self._tell(model, bucket, Fault.MEMORY, "halved", error)
        for half in (rows[:middle], rows[middle:]):
            smaller = model.smallest(bucket, half)
            cause = self._run(model, smaller, half, reason)
            if cause is None:
                continue
            if fault_of(cause) is Fault.MEMORY:
                self._fail(model, smaller, half, Fault.MEMORY, cause)
            else:
                self._recover(model, smaller, half, reason, cause)

    def _fail(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], fault: Fault, error: Exception
    ) -> None:
        # Before the callers hear: who asks then why it failed is told of a device that is broken.
        self._note(model, bucket, fault, error, "failed")
        memory = fault is Fault.MEMORY
        self._dispatcher.fail(rows, functools.partial(device_error, error, memory=memory), self._device)

    def _note(self, model: Model, bucket: Bucket, fault: Fault, error: Exception, action: str) -> None:
        self._last = model, bucket
        opened = self._dispatcher.device_failed(first_line(error), self._device)
        self._tell(model, bucket, fault, action, error)
        if opened:
            self._tell(model, bucket, fault, "opened", error)

    def _tell(
        self, model: Model, bucket: Bucket, fault: Fault, action: str, error: Exception | None = None
    ) -> None:
        record = FaultRecord(
            model.name, bucket, fault.value, action, "" if error is None else first_line(error)
        )
        level = logging.INFO if action == "closed" else logging.WARNING
        _log.log(level, "device fault, %s: %s", action, record.error, extra=asdict(record))
        if self.on_fault is not None:
            try:
                self.on_fault(record)
            except Exception:  # somebody else's code; it may cost a number, but not the loop
                _log.exception("on_fault failed")

    def _isolate(
        self, model: Model, bucket: Bucket, rows: Sequence[Row], reason: str, error: Exception
    ) -> None:
        """Find the rows that fail by halving; the others get their answers.

        One culprit among n rows costs 2 log2(n) more runs; the budget of twice that, and of two for each half
        that works, ends the search when much more is wrong than single rows.
        """
        budget = 4 * math.ceil(math.log2(max(2, len(rows))))
        todo: deque[tuple[Sequence[Row], Exception]] = deque([(rows, error)])
        while todo:
            group, cause = todo.popleft()
            if len(group) == 1 or budget < 2 or isinstance(cause, OutputError | SealedError):
                error_of = functools.partial(_model_error, model, bucket, cause)
                self._dispatcher.fail(group, error_of, self._device)
                continue
            budget -= 2
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                failure = self._run(model, model.smallest(bucket, half), half, reason)
                if failure is not None:
                    todo.append((half, failure))
                else:
                    budget += 2  # a half that works is worth going on for: the culprits are few


def _model_error(model: Model, bucket: Bucket, cause: Exception) -> ModelError:
    error = ModelError(f"model {model.name!r} failed on this request in bucket {bucket}: {first_line(cause)}")
    error.__cause__ = cause
    return error
