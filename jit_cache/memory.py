"""Memory is planned, not probed: what a set of programs needs, and which to drop if it is too much.

need = weights + scratch + outputs in flight + staging buffers + machine code + the allocator's slack

Programs of one device run one after another and share their scratch memory, so it counts once, as large
as the largest; so do the outputs of a batch, once for each batch in flight. Everything is known before any
of it is allocated, since programs compile from abstract shapes.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bucketing import Bucket
from .errors import MemoryPlanError
from .program import ProgramFacts
from .servable import Servable

__all__ = ["MemoryPlan", "plan_memory", "staging_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Which buckets are kept and what they need, in bytes.

    Attributes:
        kept: buckets to serve, rising.
        dropped: buckets left out, the least valuable first.
        budget_bytes: what there is.
        weights_bytes: parameters, one copy for all programs.
        temp_bytes: scratch of the hungriest kept program, its libraries' included.
        outputs_bytes: outputs of the largest kept program, times the batches in flight.
        staging_bytes: host or device buffers of all kept buckets' inputs.
        code_bytes: machine code of all kept programs; 0 where the backend does not tell.
        slack_bytes: freed memory that the allocator keeps.
    """

    kept: tuple[Bucket, ...]
    dropped: tuple[Bucket, ...]
    budget_bytes: int
    weights_bytes: int
    temp_bytes: int
    outputs_bytes: int
    staging_bytes: int
    code_bytes: int
    slack_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """Bytes of everything together."""
        programs = self.temp_bytes + self.outputs_bytes + self.staging_bytes + self.code_bytes
        return self.weights_bytes + programs + self.slack_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the budget, for caches."""
        return self.budget_bytes - self.need_bytes

    def explain(self) -> str:
        """The plan in one line, and what was dropped in another."""
        parts = ", ".join(
            f"{name} {_mib(size)}"
            for name, size in (
                ("weights", self.weights_bytes),
                ("scratch", self.temp_bytes),
                ("outputs in flight", self.outputs_bytes),
                ("staging", self.staging_bytes),
                ("code", self.code_bytes),
                ("slack", self.slack_bytes),
            )
        )
        text = (
            f"{len(self.kept)} buckets need {_mib(self.need_bytes)} of {_mib(self.budget_bytes)}: {parts}; "
            f"{_mib(self.free_bytes)} stay free"
        )
        if self.dropped:
            text += f"\ndropped, since they do not fit: {', '.join(map(str, self.dropped))}"
        return text


def plan_memory(
    facts_by_bucket: Mapping[Bucket, ProgramFacts],
    *,
    weights_bytes: int,
    budget_bytes: int,
    staging_bytes: Mapping[Bucket, int] | None = None,
    scratch_bytes: Mapping[Bucket, int] | None = None,
    outputs_in_flight: int = 2,
    slack_bytes: int = 0,
    values: Mapping[Bucket, float] | None = None,
) -> MemoryPlan:
    """Choose the buckets of greatest total value that fit; the smallest covering one always stays.

    Every pair of limits, on scratch and on outputs, is tried: programs beyond either are dropped, and if
    staging and code of the rest are too much, those of least value for their bytes. Without staging and
    code that is the optimum; with them it is a knapsack, and this its usual greedy answer.

    Args:
        facts_by_bucket: what the compiler said of each program.
        weights_bytes: parameters on the device.
        budget_bytes: what there is; see `servax.jit_cache.device_memory.memory_budget`.
        staging_bytes: input buffers by bucket, all sets of a bucket together; see `staging_bytes`. On a
            device with memory of its own: the copies of inputs that live there.
        scratch_bytes: what libraries take beside the compiler's scratch, by bucket; see
            `servax.jit_cache.scratch.scratch_without_weights`.
        outputs_in_flight: batches whose outputs are in memory at once.
        slack_bytes: freed memory that the allocator keeps; on a host with glibc see
            `servax.jit_cache.device_memory.HOST_SLACK_BYTES`.
        values: what each bucket is worth, such as its share of the traffic times the seconds it saves; one
            that is not named is worth 0. None means that all are worth the same, so that as few as
            possible are dropped.

    Raises:
        MemoryPlanError: if not even the covering bucket fits, naming the shortfall; or if there is none.
    """
    staging, scratch = staging_bytes or {}, scratch_bytes or {}
    needs = {
        bucket: _Need(
            facts.temp_bytes + scratch.get(bucket, 0),
            outputs_in_flight * facts.output_bytes,
            staging.get(bucket, 0),
            facts.code_bytes,
            1.0 if values is None else float(values.get(bucket, 0.0)),
        )
        for bucket, facts in sorted(facts_by_bucket.items())
    }
    shared = budget_bytes, weights_bytes, slack_bytes
    covering = _covering(list(needs))
    _require_fit(_plan([covering], needs, *shared), covering)
    kept = _choose(needs, covering, budget_bytes - weights_bytes - slack_bytes)
    # The greedy part may stop early: whatever still fits comes back, the most valuable first.
    for one in sorted(needs, key=lambda one: -needs[one].worth):
        if one not in kept and _plan([*kept, one], needs, *shared).free_bytes >= 0:
            kept.append(one)
    return _plan(kept, needs, *shared)


class _Need(NamedTuple):
    """What one program takes: its part in the two shared maxima, bytes of its own, and its worth."""

    temp: int
    output: int
    staging: int
    code: int
    worth: float

    @property
    def own(self) -> int:
        return self.staging + self.code


def _plan(
    kept: Collection[Bucket], needs: Mapping[Bucket, _Need], budget: int, weights: int, slack: int
) -> MemoryPlan:
    chosen = [needs[one] for one in kept]
    return MemoryPlan(
        kept=tuple(sorted(kept)),
        dropped=tuple(sorted((one for one in needs if one not in kept), key=lambda one: needs[one].worth)),
        budget_bytes=budget,
        weights_bytes=weights,
        temp_bytes=max(need.temp for need in chosen),
        outputs_bytes=max(need.output for need in chosen),
        staging_bytes=sum(need.staging for need in chosen),
        code_bytes=sum(need.code for need in chosen),
        slack_bytes=slack,
    )


def _choose(needs: Mapping[Bucket, _Need], covering: Bucket, room: int) -> list[Bucket]:
    """The best set over all pairs of limits on scratch and outputs."""
    keep = needs[covering]
    # Least value for its bytes first, so that a prefix is what to drop.
    order = sorted(
        (one for one in needs if one != covering), key=lambda one: needs[one].worth / max(needs[one].own, 1)
    )
    temps, outputs, owns = (
        np.array([getattr(needs[one], name) for one in order], np.int64) for name in ("temp", "output", "own")
    )
    worths = np.array([needs[one].worth for one in order], np.float64)
    best: tuple[float, int, NDArray[np.bool_]] = (-1.0, 0, np.zeros(len(order), np.bool_))
    for temp in np.unique([keep.temp, *temps[temps > keep.temp]]):
        for output in np.unique([keep.output, *outputs[outputs > keep.output]]):
            left = room - keep.own - int(temp) - int(output)
            if left < 0:
                break
            within = (temps <= temp) & (outputs <= output)
            # Bytes of the program and of all that would be kept after it.
            behind = np.cumsum(np.where(within, owns, 0)[::-1])[::-1]
            within &= behind <= left
            rank = (float(worths[within].sum()), int(within.sum()))
            if rank > best[:2]:
                best = (*rank, within)
    return [covering, *(one for one, kept in zip(order, best[2], strict=True) if kept)]


def _covering(buckets: Sequence[Bucket]) -> Bucket:
    """The smallest bucket that holds an item of every size that any bucket holds."""
    corner = tuple(max(sizes) for sizes in zip(*(one.item_sizes for one in buckets), strict=True))
    covering = [one for one in buckets if one.holds(1, corner)]
    if not covering:
        named = "x".join(map(str, corner)) or "any"
        raise MemoryPlanError(
            f"one bucket must cover every request; of {len(buckets)} buckets none holds an item of size "
            f"{named}: compile it too"
        )
    return min(covering, key=lambda one: (one.elements, one.sizes))


def _require_fit(least: MemoryPlan, covering: Bucket) -> None:
    if least.free_bytes < 0:
        raise MemoryPlanError(
            f"the weights and the smallest bucket that covers every request must fit; bucket {covering} "
            f"needs {_mib(least.need_bytes)} (weights {_mib(least.weights_bytes)}, scratch "
            f"{_mib(least.temp_bytes)}) of {_mib(least.budget_bytes)}, {_mib(-least.free_bytes)} more than "
            f"there is: lower the limits of the servable, take weights of a smaller dtype, or give it more "
            f"memory"
        )


def staging_bytes(servable: Servable, buckets: Iterable[Bucket], *, sets: int = 2) -> dict[Bucket, int]:
    """Bytes of the padded inputs of each bucket.

    Args:
        servable: whose inputs.
        buckets: at which sizes.
        sets: buffers for each bucket: one is filled while another is read.
    """
    return {
        bucket: sets
        * sum(
            math.prod(one.shape) * one.dtype.itemsize
            for one in servable.signature.abstract_at(bucket).values()
        )
        for bucket in buckets
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
