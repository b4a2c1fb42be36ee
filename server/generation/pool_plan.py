"""How many pages fit: the pool takes what weights and programs leave, before any of it is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from ...bucketing import Bucket
from ...jit_cache.device_memory import HOST_SLACK_BYTES
from ...jit_cache.errors import MemoryPlanError
from ...jit_cache.hlo_scratch import library_scratch
from ...jit_cache.memory import MemoryPlan
from .programs import Key, Programs
from .seam import FIRST_PAGE

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool, and what stands beside it.

    Attributes:
        programs: weights, state and programs.
        pages: of the pool, null and sink page included.
        page_size: tokens in a page.
        page_bytes: of one page.
    """

    programs: MemoryPlan
    pages: int
    page_size: int
    page_bytes: int

    @property
    def need_bytes(self) -> int:
        """Bytes of everything together."""
        return self.programs.need_bytes + self.pages * self.page_bytes

    def explain(self) -> str:
        """The plan in one line."""
        one, pool = self.programs, self.pages * self.page_bytes
        left = one.budget_bytes - self.need_bytes
        return (
            f"{self.need_bytes / _MIB:.1f} of {one.budget_bytes / _MIB:.1f} MiB: weights and state "
            f"{one.weights_bytes / _MIB:.1f}, scratch {one.temp_bytes / _MIB:.1f}, outputs "
            f"{one.outputs_bytes / _MIB:.1f}, code {one.code_bytes / _MIB:.1f}, slack "
            f"{one.slack_bytes / _MIB:.1f}, KV pool {pool / _MIB:.1f} ({self.pages} pages of {self.page_size}"
            f" tokens); {left / _MIB:.1f} stay free"
        )


def plan_pool(programs: Programs, keys: Sequence[Key], *, budget_bytes: int, depth: int) -> PoolPlan:
    """Plan for programs that have not allocated anything; compiles those that need most.

    Args:
        programs: their shapes name the pages that are wanted.
        keys: all programs that are going to be made.
        budget_bytes: what there is.
        depth: steps whose outputs are in memory at once.

    Returns:
        The plan, with the pages that are wanted, or fewer if only those fit.

    Raises:
        MemoryPlanError: not even one sequence of a page fits beside weights and programs.
    """
    hungry = [
        max((key for key in keys if key.kind == kind), key=lambda key: key.tokens)
        for kind in ("prefill", "decode", "mixed", "verify")
        if any(key.kind == kind for key in keys)
    ]
    for key in hungry:
        programs.compile(key)
    shapes = programs.shapes
    page_bytes = programs.kv_bytes // shapes.pages
    state_bytes = sum(_nbytes(leaf) for leaf in jax.tree.leaves(programs.state_shapes())) - programs.kv_bytes
    facts = [programs.facts[key] for key in hungry]
    on_cpu = jax.default_backend() == "cpu"
    beside = MemoryPlan(
        kept=tuple(Bucket(("batch", "chunk"), (key.rows, key.chunk)) for key in keys if key.rows),
        dropped=(),
        budget_bytes=budget_bytes,
        weights_bytes=sum(_nbytes(leaf) for leaf in jax.tree.leaves(programs.model.params)) + state_bytes,
        temp_bytes=max(programs.facts[key].temp_bytes + _scratch(programs, key) for key in hungry),
        outputs_bytes=depth
        * max(programs.facts[key].output_bytes - programs.alias_bytes[key] for key in hungry),
        staging_bytes=0,
        code_bytes=len(keys) * max(one.code_bytes for one in facts),
        slack_bytes=HOST_SLACK_BYTES if on_cpu else 0,
    )
    fit = beside.free_bytes // page_bytes
    if fit <= FIRST_PAGE:
        need = replace(beside, budget_bytes=0).need_bytes + (FIRST_PAGE + 1) * page_bytes
        raise MemoryPlanError(
            f"weights, programs and a page of the KV pool must fit; they need {need / _MIB:.1f} MiB of "
            f"{budget_bytes / _MIB:.1f}: give it more memory, or take a smaller model, fewer rows or smaller "
            f"pages"
        )
    pages = shapes.pages if shapes.pages <= fit else rounded_down(fit)
    return PoolPlan(beside, pages, shapes.page_size, page_bytes)


def rounded_down(pages: int) -> int:
    """To three significant bits: free memory varies from start to start, and programs depend on pages."""
    step = 1 << max(0, pages.bit_length() - 3)
    return max(pages // step * step, FIRST_PAGE + 1)


def _nbytes(leaf: "jax.Array | jax.ShapeDtypeStruct") -> int:
    return int(leaf.size) * leaf.dtype.itemsize


def _scratch(programs: Programs, key: Key) -> int:
    as_text = getattr(programs.compiled[key], "as_text", None)
    return library_scratch(as_text()) if as_text is not None else 0
