"""One program: the executable of one servable at one bucket, compiled ahead of time from abstract shapes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from .errors import CompileError, SignatureError
from .servable import Servable

CLOSED_OVER_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What the compiler said about a program.

    Attributes:
        compile_s: seconds of tracing, lowering and compiling.
        flops: floating-point operations of one call.
        bytes_accessed: bytes that one call reads and writes.
        argument_bytes: bytes of parameters and inputs.
        output_bytes: bytes of the outputs.
        temp_bytes: scratch memory during a call.
        code_bytes: size of the machine code.
    """

    compile_s: float
    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    code_bytes: int


class Program:
    """A compiled executable with its bucket.

    Calling it never traces or compiles. It is safe to call from one thread at a time per device.
    """

    __slots__ = ("_executable", "_leaves", "bucket", "facts")

    def __init__(
        self, bucket: Bucket, executable: Any, leaves: Sequence[jax.Array], facts: ProgramFacts
    ) -> None:
        self.bucket = bucket
        self.facts = facts
        self._executable = executable
        self._leaves = leaves

    def __repr__(self) -> str:
        return f"Program({self.bucket})"

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Launch on padded inputs, ``(batch, *padded dims)`` each.

        Returns:
            The output leaves, in the order of the servable's outputs; still being computed where the
            device runs asynchronously.
        """
        return jax.tree.leaves(self._executable(self._leaves, inputs))


def compile_program(servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
    """Trace, lower and compile a servable at a bucket.

    Args:
        servable: what to compile.
        bucket: at which sizes.
        leaves: the parameters on the device, shared by all programs of the servable.

    Raises:
        CompileError: if tracing or compiling fails; the cause is chained and quoted.
        SignatureError: if the function closes over large arrays.
    """
    begin = time.perf_counter()
    try:
        traced = jax.jit(servable.run_flat).trace(
            servable.abstract_leaves, servable.signature.abstract_at(bucket)
        )
        _refuse_closed_over(servable, traced.jaxpr.consts)
        executable = traced.lower().compile()
    except SignatureError:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise CompileError(
            f"model {servable.name!r} must compile at every bucket of its grid; bucket {bucket} failed with "
            f"{type(error).__name__}: {first_line}"
        ) from error
    return Program(bucket, executable, leaves, _facts(executable, time.perf_counter() - begin))


def _refuse_closed_over(servable: Servable, consts: Sequence[Any]) -> None:
    total = sum(getattr(const, "nbytes", 0) for const in consts)
    if total > CLOSED_OVER_LIMIT_BYTES:
        shapes = [f"{const.dtype}{list(const.shape)}" for const in consts if getattr(const, "nbytes", 0)]
        raise SignatureError(
            f"parameters are arguments, so that all programs share one copy; model {servable.name!r} closes "
            f"over {total} bytes: {', '.join(shapes[:5])}. Pass them in params"
        )


def _facts(executable: Any, compile_s: float) -> ProgramFacts:
    # Both analyses are optional on some backends: None, or an empty list.
    cost = executable.cost_analysis() or {}
    if isinstance(cost, list):
        cost = cost[0] if cost else {}
    memory = executable.memory_analysis()
    return ProgramFacts(
        compile_s=compile_s,
        flops=float(cost.get("flops", 0.0)),
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        argument_bytes=int(getattr(memory, "argument_size_in_bytes", 0)),
        output_bytes=int(getattr(memory, "output_size_in_bytes", 0)),
        temp_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
        code_bytes=int(getattr(memory, "generated_code_size_in_bytes", 0)),
    )
