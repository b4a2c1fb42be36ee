"""One program: the executable of one servable at one bucket, compiled ahead of time from abstract shapes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from .errors import CompileError, InputError, JitCacheError, SignatureError, call_remedy
from .fusion import inspect_program
from .hosts import Led
from .placement import Turn, turn_of
from .prune import constants, live_arguments, over_live
from .servable import Servable
from .tune import STATIC

# A causal mask or a table of angles of usual size may be a constant; a weight matrix may not.
CLOSED_OVER_LIMIT_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What the compiler said about a program.

    Attributes:
        compile_s: seconds of tracing, lowering and compiling.
        flops: floating-point operations of one call, loops counted as often as they run.
        bytes_accessed: bytes that one call reads and writes, likewise.
        argument_bytes: bytes of parameters and inputs.
        output_bytes: bytes of the outputs.
        temp_bytes: scratch memory during a call.
        code_bytes: size of the machine code; as it is stored where the backend does not tell (a CPU's).
        source: ``compiled`` here, ``copied`` from one that was compiled for other devices, ``store`` if it
            was loaded, or ``shared`` if another program in memory has the same executable; then the other
            facts are of its compile.
        ready_s: seconds that it took here until the program could run.
        run_s: seconds of one run, if known from an earlier start or from whom it is shared with.
    """

    compile_s: float
    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    code_bytes: int
    source: str = "compiled"
    ready_s: float = 0.0
    run_s: float | None = None


class Program:
    """A compiled executable with its bucket.

    Calling it never traces or compiles. It is safe to call from one thread at a time per device.

    Args:
        bucket: the sizes it runs at.
        executable: ``(list of used leaves, used inputs by name) -> list of output leaves``.
        leaves: all parameters of the servable, on the device.
        facts: what the compiler said.
        used_leaves: indices of the parameters that the executable takes, rising; None for all.
        used_inputs: names of the inputs that it takes; None for all.
        turn: where it runs on several devices, what launches of such programs take turns by.
        variant: which variant of the servable it is, see `servax.jit_cache.tune`.
    """

    __slots__ = (
        *("_arguments", "_turn", "bucket", "executable", "facts", "used_inputs", "used_leaves", "variant"),
    )

    def __init__(
        self,
        bucket: Bucket,
        executable: Any,
        leaves: Sequence[jax.Array],
        facts: ProgramFacts,
        *,
        used_leaves: Sequence[int] | None = None,
        used_inputs: Sequence[str] | None = None,
        turn: Turn | None = None,
        variant: str = STATIC,
    ) -> None:
        self._turn = turn
        self.variant = variant
        self.bucket = bucket
        self.executable = executable
        self.facts = facts
        self.used_leaves = None if used_leaves is None else tuple(used_leaves)
        self.used_inputs = None if used_inputs is None else tuple(used_inputs)
        self._arguments = list(leaves) if used_leaves is None else [leaves[index] for index in used_leaves]

    def __repr__(self) -> str:
        return f"Program({self.bucket})"

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "Program":
        """The same executable over other parameters of the same shapes and dtypes; compiles nothing."""
        return Program(
            self.bucket,
            self.executable,
            leaves,
            self.facts,
            used_leaves=self.used_leaves,
            used_inputs=self.used_inputs,
            turn=self._turn,
            variant=self.variant,
        )

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Launch on padded inputs, ``(batch, *padded dims)`` each.

        Returns:
            The output leaves, in the order of the servable's outputs; still being computed where the
            device runs asynchronously.

        Raises:
            InputError: if an input is missing or has another shape or dtype than the program's; nothing
                ran and nothing was compiled.
        """
        names = self.used_inputs
        try:
            used = dict(inputs) if names is None else {name: inputs[name] for name in names}
            if self._turn is None:
                outputs: list[jax.Array] = self.executable(self._arguments, used)
            else:
                with self._turn:
                    outputs = self.executable(self._arguments, used)
        except (TypeError, KeyError) as error:
            sizes = ", ".join(
                f"{axis}={size}" for axis, size in zip(self.bucket.axes, self.bucket.sizes, strict=True)
            )
            what = (
                f"{error} is missing" if isinstance(error, KeyError) else str(error).split("\n")[-1].strip()
            )
            raise InputError(
                f"a program runs at its own sizes and dtypes only, here {sizes}; {what}: pad to the bucket "
                f"and cast first"
            ) from error
        return outputs


@dataclass(frozen=True, slots=True)
class Built:
    """An executable and which parameters and inputs it takes; see `Program`."""

    executable: Any
    used_leaves: Sequence[int]
    used_inputs: Sequence[str]


def compile_program(servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
    """Trace, lower and compile a servable at a bucket.

    The program takes only the parameters and inputs that reach its outputs.

    Args:
        servable: what to compile.
        bucket: at which sizes.
        leaves: the parameters on the device, shared by all programs of the servable.

    Raises:
        CompileError: if tracing or compiling fails; the cause is chained and quoted.
        OutputError: if what it returns at this bucket does not agree with the servable's outputs.
        SignatureError: if the function closes over large arrays, or its outputs cannot be inferred.
    """
    begin = time.perf_counter()
    hosts, names = servable.hosts, [servable.name, servable.layout, servable.variant, bucket.sizes]
    if hosts is None:
        built = build(servable, bucket)
        executable = built.executable
    else:
        with hosts.compiling(servable.name, servable.signature, names, f"bucket {bucket}"):
            built = build(servable, bucket)
        shapes = servable.program_inputs(bucket)
        executable = Led(hosts, built.executable, names, {name: shapes[name] for name in built.used_inputs})
    facts = facts_of(built.executable, time.perf_counter() - begin)
    return Program(
        bucket,
        executable,
        leaves,
        facts,
        used_leaves=built.used_leaves,
        used_inputs=built.used_inputs,
        turn=turn_of(servable.devices),
        variant=servable.variant,
    )


def build(servable: Servable, bucket: Bucket) -> Built:
    """Trace, lower and compile; raises as `compile_program` does."""
    structure: list[Any] = []

    def flat(leaves: Sequence[Any], inputs: Mapping[str, Any]) -> list[Any]:
        # Lists in and out: no type of the user's is part of the executable, so it can be stored.
        outputs, treedef = jax.tree.flatten(servable.run_flat(leaves, inputs))
        structure.append(treedef)
        return outputs

    def check(shapes: Sequence[Any]) -> None:
        servable.outputs.check_program(shapes, structure[-1], bucket.rows, bucket.item_sizes)

    return build_flat(servable, flat, servable.traced_inputs(bucket), check, where=f"bucket {bucket}")


def build_flat(
    servable: Servable,
    flat: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]],
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    check: Callable[[Sequence[Any]], None] | None = None,
    *,
    where: str,
) -> Built:
    """Trace, lower and compile a function of a servable's parameters and some inputs.

    Args:
        servable: whose parameters it takes.
        flat: ``(leaves, inputs by name) -> list of arrays``.
        inputs: shape and dtype of each input.
        check: told the outputs' shapes once it is traced, before it is compiled; may raise.
        where: names the program in errors.

    Raises:
        CompileError, OutputError, SignatureError: as `compile_program`.
    """
    try:
        return _compile(servable, flat, inputs, check)
    except JitCacheError:
        raise
    except Exception as error:
        first_line = (str(error).strip() or "no message").split("\n", 1)[0]
        raise CompileError(
            f"model {servable.name!r} must compile at every bucket of its grid; {where} failed with "
            f"{type(error).__name__}: {first_line}{call_remedy(error)}"
        ) from error


def _compile(
    servable: Servable,
    flat: Callable[..., list[Any]],
    inputs: Mapping[str, Any],
    check: Callable[[Sequence[Any]], None] | None,
) -> Built:
    leaves = servable.traced_leaves()
    # Of several processes each gets the whole of the outputs, or the leader could not read them.
    options: dict[str, Any] = {}
    if servable.placement is not None and servable.placement.spans:
        options["out_shardings"] = servable.placement.everywhere
    traced = jax.jit(flat, **options).trace(leaves, inputs)
    _refuse_closed_over(servable, constants(traced.jaxpr))
    if check is not None:
        check(traced.out_info)
    live = live_arguments(traced.jaxpr)
    count = len(leaves)
    used_leaves = [index for index in range(count) if live[index]]
    # JAX flattens a mapping in the order of its keys.
    used_inputs = [name for name, used in zip(sorted(inputs), live[count:], strict=True) if used]
    if not all(live):
        pruned = over_live(traced.jaxpr, live)
        cut = jax.jit(lambda leaves, inputs: pruned(*leaves, *map(inputs.get, used_inputs)), **options)
        traced = cut.trace(
            [leaves[index] for index in used_leaves],
            {name: inputs[name] for name in used_inputs},
        )
    return Built(traced.lower().compile(), used_leaves, used_inputs)


def _refuse_closed_over(servable: Servable, arrays: Sequence[Any]) -> None:
    total = sum(array.nbytes for array in arrays)
    if total > CLOSED_OVER_LIMIT_BYTES:
        largest = sorted(arrays, key=lambda array: -array.nbytes)[:5]
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in largest)
        raise SignatureError(
            f"parameters are arguments, so that all programs share one copy; model {servable.name!r} closes "
            f"over {total} bytes (at most {CLOSED_OVER_LIMIT_BYTES}): {shapes}. Pass weights in params, and "
            f"make constants with jax.numpy inside the function"
        )


def facts_of(executable: Any, compile_s: float) -> ProgramFacts:
    """What the compiler says about a fresh executable."""
    # Both analyses are optional on some backends: None, or an empty list.
    cost = executable.cost_analysis() or {}
    if isinstance(cost, list):
        cost = cost[0] if cost else {}
    memory = executable.memory_analysis()
    # The compiler's own count takes the body of a loop once: of 6 scanned layers it sees one.
    work = inspect_program(executable)
    return ProgramFacts(
        compile_s=compile_s,
        flops=max(float(cost.get("flops", 0.0)), work.flops),
        bytes_accessed=max(float(cost.get("bytes accessed", 0.0)), work.bytes_accessed),
        argument_bytes=int(getattr(memory, "argument_size_in_bytes", 0)),
        output_bytes=int(getattr(memory, "output_size_in_bytes", 0)),
        temp_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
        code_bytes=int(getattr(memory, "generated_code_size_in_bytes", 0)) or _serialized_bytes(executable),
        ready_s=compile_s,
    )


def _serialized_bytes(executable: Any) -> int:
    try:
        return len(executable.runtime_executable().serialize())
    except Exception:  # not every backend can; then it counts as nothing
        return 0
