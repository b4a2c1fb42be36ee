"""A compiled stepped program, its cases as programs of their own, and the host buffers of a call."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from .errors import InputError
from .placement import Turn, turn_of
from .program import Program, ProgramFacts, facts_of
from .servable import Servable
from .signature import Signature
from .staging import Staging
from .stepped import CASE, STEPS, Layout, StepPlan, build_stepped
from .tune import SWITCHED


class SteppedProgram:
    """A compiled stepped program with its parameters.

    Args:
        layout: where everything lies.
        executable: ``(list of leaves, inputs by name) -> list of flat outputs``.
        leaves: all parameters of the servable, on the device.
        facts: of the whole of it.
        used_leaves: indices of the parameters that the executable takes.
        used_inputs: names of the inputs that it takes.
        run_s: seconds of one run of each case, as far as they are known from an earlier start.
        turn: see `Program`.
    """

    def __init__(
        self,
        layout: Layout,
        executable: Any,
        leaves: Sequence[jax.Array],
        facts: ProgramFacts,
        *,
        used_leaves: Sequence[int],
        used_inputs: Sequence[str],
        run_s: Mapping[Bucket, float] | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.layout, self.executable, self.facts = layout, executable, facts
        self.run_s = dict(run_s or {})
        self._turn = turn
        self._used_leaves, self._used_inputs = tuple(used_leaves), tuple(used_inputs)
        self._arguments = [leaves[index] for index in used_leaves]

    def __call__(self, inputs: Mapping[str, Any]) -> list[jax.Array]:
        """Launch the steps that a `StepStaging` holds; returns flat outputs, see `pieces`."""
        used = {name: inputs[name] for name in self._used_inputs}
        if self._turn is None:
            outputs: list[jax.Array] = self.executable(self._arguments, used)
        else:
            with self._turn:
                outputs = self.executable(self._arguments, used)
        return outputs

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "SteppedProgram":
        """The same executable over other parameters of the same shapes and dtypes; compiles nothing."""
        return SteppedProgram(
            self.layout,
            self.executable,
            leaves,
            self.facts,
            used_leaves=self._used_leaves,
            used_inputs=self._used_inputs,
            run_s=self.run_s,
            turn=self._turn,
        )

    def pieces(self, outputs: Sequence[Any], step: int, case: Bucket) -> list[np.ndarray]:
        """The output leaves of one step on the host, ``(batch, *dims)`` each; waits for the device.

        Args:
            outputs: what the call returned.
            step: number of the step.
            case: its bucket.
        """
        shapes = self.layout.outputs[self.layout.plan.index[case]]
        return [
            np.asarray(out)[step, : math.prod(shape)].reshape(shape)
            for out, shape in zip(outputs, shapes, strict=True)
        ]

    def case(self, bucket: Bucket) -> "CaseProgram":
        """One bucket of it, to be used like a program of its own."""
        return CaseProgram(self, bucket)


class CaseProgram(Program):
    """One bucket of a stepped program; called by itself it runs a single step.

    Args:
        stepped: what it is a case of.
        bucket: which case.

    Raises:
        InputError: if the bucket is none of its cases.
    """

    __slots__ = ("stepped",)

    def __init__(self, stepped: SteppedProgram, bucket: Bucket) -> None:
        plan = stepped.layout.plan
        if bucket not in plan.index:
            raise InputError(
                f"a stepped program runs the buckets it was made of, {', '.join(map(str, plan.cases))}; got "
                f"{bucket}: compile it, or run in a larger one"
            )
        self.stepped = stepped
        # Its share of what all cases hold together: the caches add programs up.
        each = stepped.facts.code_bytes // len(plan.cases)
        share = replace(stepped.facts, code_bytes=each, run_s=stepped.run_s.get(bucket))
        super().__init__(bucket, stepped.executable, (), share, variant=SWITCHED)

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "CaseProgram":
        """The same case over other parameters; compiles nothing."""
        return CaseProgram(self.stepped.with_leaves(leaves), self.bucket)

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> list[Any]:
        """Launch on padded inputs ``(batch, *padded dims)``; returns host arrays, so it waits."""
        layout = self.stepped.layout
        flat: dict[str, Any] = layout.buffers()
        shapes = layout.inputs[layout.plan.index[self.bucket]]
        for name, shape in shapes.items():
            given = inputs.get(name)
            if given is None or given.shape != shape or given.dtype != layout.dtypes[name]:
                got = "nothing" if given is None else f"{given.dtype}{list(given.shape)}"
                raise InputError(
                    f"a program runs at its own sizes and dtypes only, here {name} of "
                    f"{layout.dtypes[name]}{list(shape)}; got {got}: pad to the bucket and cast first"
                )
            flat[name][0, : given.size] = given.reshape(-1)
        flat[CASE][0] = layout.plan.index[self.bucket]
        flat[STEPS][...] = 1
        return list(self.stepped.pieces(self.stepped(flat), 0, self.bucket))


class StepStaging:
    """Host buffers of one call of a stepped program; see `Staging` for who may use them when.

    Args:
        signature: of the servable.
        layout: of the program.
    """

    def __init__(self, signature: Signature, layout: Layout) -> None:
        self._signature, self._layout = signature, layout
        self.arrays = layout.buffers()
        self._views: list[dict[Bucket, Staging]] = [{} for _ in range(layout.plan.steps)]
        self._last: list[Staging | None] = [None] * layout.plan.steps

    def fill(
        self,
        step: int,
        case: Bucket,
        items: Sequence[Mapping[str, np.ndarray]],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Write the items of one step and pad the rest; steps are filled from 0 on, `close` ends it.

        Args:
            step: number of the step.
            case: its bucket.
            items: checked items, at most as many as the bucket has rows.
            sizes: the items' sizes, in the order of the signature's axes.
        """
        view = self._views[step].get(case)
        if view is None:
            view = self._views[step][case] = Staging(self._signature, case, self._prefixes(step, case))
        elif self._last[step] is not view:
            view.lay_positions()
        self._last[step] = view
        view.fill(items, sizes)
        self.arrays[CASE][step] = self._layout.plan.index[case]

    def close(self, steps: int) -> dict[str, np.ndarray]:
        """The inputs of a call that runs so many steps; the same arrays at every call."""
        self.arrays[STEPS][...] = steps
        return self.arrays

    def _prefixes(self, step: int, case: Bucket) -> dict[str, np.ndarray]:
        shapes = self._layout.inputs[self._layout.plan.index[case]]
        return {
            name: self.arrays[name][step, : math.prod(shape)].reshape(shape) for name, shape in shapes.items()
        }


def compile_stepped(servable: Servable, plan: StepPlan, leaves: Sequence[jax.Array]) -> SteppedProgram:
    """Compile all cases of a plan into one program; raises as `build_stepped` does."""
    begin = time.perf_counter()
    built = build_stepped(servable, plan)
    facts = facts_of(built.executable, time.perf_counter() - begin)
    return SteppedProgram(
        Layout(servable, plan),
        built.executable,
        leaves,
        facts,
        used_leaves=built.used_leaves,
        used_inputs=built.used_inputs,
        turn=turn_of(servable.devices),
    )
