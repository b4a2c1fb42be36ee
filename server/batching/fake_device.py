"""A device that can be held, that fails on command and computes in plain NumPy; for tests, ours and yours.

    device = FakeDevice()
    server = Server(servable, compile_program=device.compile)

Programs are the servable's own function on NumPy arrays, or any function given here. What runs is computed
when the server asks for the outputs, out of the buffers it handed over, as an asynchronous device would.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...bucketing import Bucket
from ...jit_cache import Program, ProgramFacts, Servable

Inputs = Mapping[str, np.ndarray]
RunFunction = Callable[[Bucket, Inputs], Sequence[Any]]
_FACTS = ProgramFacts(
    compile_s=0.0, flops=0.0, bytes_accessed=0.0, argument_bytes=0, output_bytes=0, temp_bytes=0, code_bytes=0
)


@dataclass(frozen=True, slots=True)
class FakeRun:
    """One launch: its bucket and a copy of its padded inputs."""

    bucket: Bucket
    inputs: Inputs


class FakeDevice:
    """Makes programs that run in NumPy and obey a test.

    Args:
        run: ``(bucket, padded inputs) -> output leaves``; by default the servable's own function, which must
            then work on NumPy arrays.

    Attributes:
        runs: every launch so far, warm-up included.
        held: set while a launched run waits to be released.
    """

    def __init__(self, run: RunFunction | None = None) -> None:
        self._run = run
        self._gate = threading.Condition()
        self._may_end = math.inf
        self.held = threading.Event()
        self.runs: list[FakeRun] = []

    def compile(self, servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
        """The program of a bucket; give this method to `Server` as ``compile_program``."""

        def execute(params: Sequence[jax.Array], inputs: Inputs) -> list[Any]:
            self.runs.append(FakeRun(bucket, {name: array.copy() for name, array in inputs.items()}))
            outputs = _Once(lambda: self._compute(servable, bucket, params, inputs))
            return [_Pending(outputs, index) for index in range(len(servable.outputs.leaves))]

        return Program(bucket, execute, leaves, _FACTS)

    def hold(self) -> None:
        """From now on runs stay on the device until `release`."""
        with self._gate:
            self._may_end = 0
            self.held.clear()

    def release(self, runs: int | None = None) -> None:
        """Let so many runs end and hold those after them; None lets all end."""
        with self._gate:
            self._may_end = math.inf if runs is None else self._may_end + runs
            self.held.clear()
            self._gate.notify_all()

    def _compute(
        self, servable: Servable, bucket: Bucket, params: Sequence[jax.Array], inputs: Inputs
    ) -> list[np.ndarray]:
        with self._gate:
            if not self._may_end:
                self.held.set()
                self._gate.wait_for(lambda: self._may_end)
            self._may_end -= 1
        if self._run is not None:
            return [np.asarray(leaf) for leaf in self._run(bucket, inputs)]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(servable.run_flat(params, inputs))]


class _Once:
    """A value that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], list[np.ndarray]]) -> None:
        self._compute = compute
        self._value: list[np.ndarray] | None = None

    def get(self) -> list[np.ndarray]:
        if self._value is None:
            self._value = self._compute()
        return self._value


class _Pending:
    """One output leaf that is not there yet; becomes an array when NumPy asks."""

    def __init__(self, outputs: _Once, index: int) -> None:
        self._outputs = outputs
        self._index = index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self._outputs.get()[self._index]
        return value.astype(value.dtype if dtype is None else dtype, copy=bool(copy))
