"""Sizes as data: one program that runs a list of steps, each in a bucket of its own.

A static program is one box. This one holds many: its *cases* are buckets, an argument says how many steps
to run and another which case each step takes. So the number of blocks, and with several cases the size of
each, are data (`jax.lax.fori_loop` around `jax.lax.switch`). With one case it is a loop: one program for
every batch size, at the cost of the blocks that are used. With many it runs a mixed queue in one call.

Every input and output is a flat row a step, as wide as the largest case needs; a case takes a prefix of it
and gives it its own shape, so nothing depends on which axes vary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..bucketing import Bucket
from .errors import SignatureError
from .program import Built, build_flat
from .servable import Servable

# No identifiers, so that no input of a model has these names.
STEPS, CASE = "#steps", "#case"


@dataclass(frozen=True)
class StepPlan:
    """What one stepped program holds.

    Args:
        cases: buckets over the same axes, each once; one makes a looped program, several a switched one.
        steps: most steps of one call.

    Raises:
        SignatureError: if there is no case, one twice, or no step.
    """

    cases: tuple[Bucket, ...]
    steps: int = 8

    def __post_init__(self) -> None:
        if not self.cases or len(set(self.cases)) < len(self.cases) or self.steps < 1:
            raise SignatureError(
                f"a stepped program has at least one case, each once, and one step; got "
                f"{[str(case) for case in self.cases]} and {self.steps} steps"
            )

    @cached_property
    def index(self) -> Mapping[Bucket, int]:
        """Number of each case."""
        return {case: number for number, case in enumerate(self.cases)}

    def described(self) -> dict[str, Any]:
        """As plain values, for the program's key."""
        return {"cases": [list(case.sizes) for case in self.cases], "steps": self.steps}


class Layout:
    """Where the inputs and outputs of each case lie in the flat rows of a stepped program.

    Args:
        servable: whose program.
        plan: its cases.

    Attributes:
        inputs: shape ``(batch, *dims)`` of each input by name, for each case.
        outputs: shape of each output leaf, cut to the case's own sizes, for each case.
        widths: elements of a step's row, by input name.
        output_widths: the same for each output leaf.
    """

    def __init__(self, servable: Servable, plan: StepPlan) -> None:
        self.plan = plan
        self._everywhere = None if servable.placement is None else servable.placement.everywhere
        signature, outputs = servable.signature, servable.outputs
        self.inputs = [
            {name: one.shape for name, one in signature.abstract_at(case).items()} for case in plan.cases
        ]
        self.outputs = [
            [(case.rows, *outputs.item_shape(leaf, case.item_sizes)) for leaf in outputs.leaves]
            for case in plan.cases
        ]
        self.dtypes = {one.name: one.dtype for one in signature.everything}
        self.output_dtypes = [leaf.dtype for leaf in outputs.leaves]
        self.widths = {name: max(math.prod(shapes[name]) for shapes in self.inputs) for name in self.dtypes}
        self.output_widths = [
            max(math.prod(shapes[leaf]) for shapes in self.outputs) for leaf in range(len(outputs.leaves))
        ]

    def buffers(self) -> dict[str, np.ndarray]:
        """Zeroed host buffers of one call, by input name."""
        return {name: np.zeros(one.shape, one.dtype) for name, one in self.abstract().items()}

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments of the program beside the parameters; each device of several gets all of them."""
        steps = self.plan.steps
        rows = {
            name: jax.ShapeDtypeStruct((steps, width), self.dtypes[name])
            for name, width in self.widths.items()
        }
        found = {
            **rows,
            STEPS: jax.ShapeDtypeStruct((), np.int32),
            CASE: jax.ShapeDtypeStruct((steps,), np.int32),
        }
        if self._everywhere is None:
            return found
        return {name: one.update(sharding=self._everywhere) for name, one in found.items()}


def build_stepped(servable: Servable, plan: StepPlan) -> Built:
    """Trace, lower and compile all cases into one executable.

    Raises:
        CompileError, OutputError: as `compile_program`.
    """
    layout = Layout(servable, plan)

    def flat(leaves: Sequence[Any], inputs: Mapping[str, Any]) -> list[Any]:
        branches = [_branch(servable, layout, number, leaves, inputs) for number in range(len(plan.cases))]

        def step(place: Any, outs: list[Any]) -> list[Any]:
            if len(branches) == 1:
                rows = branches[0](place)
            else:
                rows = jax.lax.switch(inputs[CASE][place], branches, place)
            return [
                jax.lax.dynamic_update_slice(out, row[None], (place, 0))
                for out, row in zip(outs, rows, strict=True)
            ]

        empty = [
            jnp.zeros((plan.steps, width), dtype)
            for width, dtype in zip(layout.output_widths, layout.output_dtypes, strict=True)
        ]
        done: list[Any] = jax.lax.fori_loop(0, jnp.minimum(inputs[STEPS], plan.steps), step, empty)
        return done

    return build_flat(servable, flat, layout.abstract(), where=f"steps of {len(plan.cases)} buckets")


def _branch(
    servable: Servable, layout: Layout, number: int, leaves: Sequence[Any], inputs: Mapping[str, Any]
) -> Any:
    case = layout.plan.cases[number]

    def run(place: Any) -> list[Any]:
        given = {
            name: jax.lax.dynamic_slice(inputs[name], (place, 0), (1, math.prod(shape))).reshape(shape)
            for name, shape in layout.inputs[number].items()
        }
        if servable.placement is not None:
            split = servable.placement.of_input
            given = {
                name: jax.lax.with_sharding_constraint(one, split(name, one.shape))
                for name, one in given.items()
            }
        found, treedef = jax.tree.flatten(servable.run_flat(leaves, given))
        servable.outputs.check_program(found, treedef, case.rows, case.item_sizes)
        rows = []
        for leaf, shape, width in zip(found, layout.outputs[number], layout.output_widths, strict=True):
            row = leaf[tuple(map(slice, shape))].reshape(-1)
            rows.append(jnp.pad(row, (0, width - row.size)))
        return rows

    return run
