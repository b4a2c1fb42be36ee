"""How the programs of one model are made: in which variant, and which variant proved the fastest."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax

from ...bucketing import Bucket
from ...jit_cache import Program, Servable
from ...jit_cache.step_program import CaseProgram, SteppedProgram, compile_stepped
from ...jit_cache.stepped import StepPlan
from ...jit_cache.tune import SWITCHED, Tuner
from ..errors import Closed
from ..events import making

Compile = Callable[[Servable, Bucket, Sequence[Any]], Program]
# Enough for the overhead of a call to vanish among its steps; more would only hold the device for longer.
_STEPS = 8


class Maker:
    """Makes programs; compile thread only, but for `learned` and `best`.

    Args:
        servable: whose.
        compile_program: makes the program of a bucket. If it has methods ``stepped``, ``timed``,
            ``measured`` and ``infer_outputs`` (as `StoredPrograms` does), those go through them too.

    Attributes:
        tuner: the variants of the servable, and what is known about their speed.
        cause: why its programs are made now; "" for what the phase of the compile thread says.
        causes: the same by bucket, of those that somebody asked for one by one.
    """

    def __init__(self, servable: Servable, compile_program: Compile) -> None:
        self._served: Servable | None = servable
        self._compile = compile_program
        self.tuner = Tuner(servable.variants)
        self.name, self.cause = servable.name, ""
        self.causes: dict[Bucket, str] = {}
        self._leaves: Sequence[jax.Array] | None = None
        self._early: dict[Bucket, Program] = {}
        self._stepped: SteppedProgram | None = None
        self._recalled: set[Bucket] = set()

    def __call__(self, bucket: Bucket) -> Program:
        """The program of a bucket over the weights, in the variant that is best as far as is known."""
        if self._leaves is None:
            self._leaves = self._servable.place()
            if self._stepped is not None:
                self._stepped = self._stepped.with_leaves(self._leaves)
        self._infer_outputs()
        early = self._early.pop(bucket, None)
        if early is not None and not isinstance(early, CaseProgram):
            return early.with_leaves(self._leaves)
        self._recall(bucket)
        return self.variant(bucket, self.tuner.best(bucket))

    def early(self, bucket: Bucket, leaves: Sequence[Any], *, keep: bool) -> Program:
        """A program before the weights are on the device.

        Args:
            bucket: where.
            leaves: of what kind the weights are.
            keep: whether it is to be taken over once they are.
        """
        if bucket in self._early:
            return self._early[bucket]
        self._infer_outputs()
        program = self._make(bucket, self.tuner.variants[0], leaves)
        if keep:
            self._early[bucket] = program
        return program

    def apart(self, servable: Servable, bucket: Bucket) -> Program:
        """A program of another form of the model, over the weights as they are; kept by nobody."""
        return self._compile(servable, bucket, servable.leaves)

    def drop_early(self, bucket: Bucket | None = None) -> None:
        """Forget what was made early, of one bucket or of all."""
        for one in [bucket] if bucket is not None else list(self._early):
            self._early.pop(one, None)

    def variant(self, bucket: Bucket, variant: str) -> Program:
        """The program of a bucket in one variant, over the weights.

        A bucket that is no case of the switched program, since a re-fit brought it, gets one of its own.
        """
        return self._make(bucket, variant, self._leaves if self._leaves is not None else ())

    def _make(self, bucket: Bucket, variant: str, leaves: Sequence[Any]) -> Program:
        with making(self.causes.get(bucket, self.cause), self.name, str(bucket)):
            return self._made(bucket, variant, leaves)

    def _made(self, bucket: Bucket, variant: str, leaves: Sequence[Any]) -> Program:
        if variant != SWITCHED or bucket not in self._plan.index:
            function = self._servable if variant == SWITCHED else self._servable.as_variant(variant)
            return self._compile(function, bucket, leaves)
        if self._stepped is None:
            make = getattr(self._compile, "stepped", compile_stepped)
            self._stepped = make(self._servable, self._plan, leaves)
        return self._stepped.case(bucket)

    def _infer_outputs(self) -> None:
        """Here, where tracing is allowed; a version of the same shapes need not be traced."""
        infer = getattr(self._compile, "infer_outputs", None)
        _ = self._servable.outputs if infer is None else infer(self._servable)

    @property
    def _servable(self) -> Servable:
        if self._served is None:
            raise Closed("programs are made while a model is served; this one gave way: ask its successor")
        return self._served

    @cached_property
    def _plan(self) -> StepPlan:
        return StepPlan(self._servable.grid.buckets, _STEPS)

    def release(self) -> None:
        """Let weights and programs go."""
        self._served = self._leaves = self._stepped = None
        self._early.clear()

    # -- timing --------------------------------------------------------------------------------------

    def _recall(self, bucket: Bucket) -> None:
        """What an earlier start measured, if there is anything to choose."""
        timed = getattr(self._compile, "timed", None)
        if timed is None or not self.tuner.needed or bucket in self._recalled:
            return
        self._recalled.add(bucket)
        for variant in self.tuner.variants:
            if variant == SWITCHED:
                seconds = timed(self._servable, bucket, self._plan)
            else:
                seconds = timed(self._servable.as_variant(variant), bucket)
            if seconds is not None:
                self.tuner.record(bucket, variant, seconds)

    def learned(self, program: Program, seconds: float) -> None:
        """One run of a program was timed; remembered for starts to come where there is a store."""
        self.tuner.record(program.bucket, program.variant, seconds)
        measured = getattr(self._compile, "measured", None)
        if measured is None:
            return
        if isinstance(program, CaseProgram):
            measured(self._servable, program.bucket, seconds, program.stepped.layout.plan)
        else:
            measured(self._servable.as_variant(program.variant), program.bucket, seconds)

    def scratch(self, program: Program) -> int | None:
        """Bytes that libraries take while a program runs, if an earlier start measured them."""
        known = getattr(self._compile, "scratch", None)
        if known is None or isinstance(program, CaseProgram):
            return None
        found: int | None = known(self._servable.as_variant(program.variant), program.bucket)
        return found

    def learned_scratch(self, program: Program, peak_bytes: int) -> None:
        """By how much one run raised the process's memory; remembered where there is a store."""
        measured = getattr(self._compile, "measured_scratch", None)
        if measured is not None and not isinstance(program, CaseProgram):
            beside = peak_bytes - program.facts.temp_bytes - program.facts.output_bytes
            measured(self._servable.as_variant(program.variant), program.bucket, max(0, beside))
