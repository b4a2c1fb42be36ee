"""How a server makes, keeps and checks its programs: one set of options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...jit_cache.schedule import Shape
from ..errors import ConfigError

OnPlan = Callable[[str, Any], None]
"""Told the model's name and a `MemoryPlan`, or the `PoolPlan` of a language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Options of `Server` about its programs.

    Attributes:
        policy: what a request does whose bucket is not in memory. It always runs in a larger one that is, or
            split, and is counted as a cold hit. ``"strict"``: that is all; nothing is loaded or compiled but
            by the warm-up. ``"background"``: the better program is loaded or compiled in the compile thread
            and used from the next batch on. ``"lazy"``: the same, and nothing is warmed before the first
            request, which waits for the covering program; for development.
        cache_bytes: most bytes of programs of one model in memory; the least asked for leave and come back
            when they are asked for, which the policy ``"strict"`` forbids. The covering one never leaves.
            None for no bound.
        memory_bytes: memory that weights and programs may take; all programs are then compiled and planned
            before the weights are put on the device, and the buckets of least value are dropped if it is too
            much. None plans nothing.
        budget_s: seconds of warm-up after which the server gets ready with what is warm, the covering bucket
            at least; the rest follows in the background. None waits for all.
        budget_bytes: bytes of programs beyond which warm-up makes no more. None for no bound.
        shapes: what arrives, by model name: decides the order of the warm-up and what is dropped first.
        check_padding: refuse a model whose answers depend on padding or neighbours, by probing it before
            anything is warmed. True for all; or, by model name, options of
            `servax.jit_cache.safety.check_padding` for those that are to be checked.
        check_outputs: refuse an answer that holds NaN: its caller gets an error, and it is counted.
        on_plan: told the model's name and the memory plan before anything is allocated.

    Raises:
        ConfigError: on an impossible setting.
    """

    policy: str = "strict"
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    budget_s: float | None = None
    budget_bytes: int | None = None
    shapes: Mapping[str, Sequence[Shape]] | None = None
    check_padding: bool | Mapping[str, Mapping[str, Any]] = False
    check_outputs: bool = False
    on_plan: OnPlan | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("strict", "background", "lazy"):
            raise ConfigError(f"policy is 'strict', 'background' or 'lazy'; got {self.policy!r}")
        for name in ("cache_bytes", "memory_bytes", "budget_s", "budget_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**63:
                raise ConfigError(f"{name} is above 0, or None for no bound; got {value}")
        if self.cache_bytes is not None and self.policy == "strict":
            raise ConfigError(
                "programs that left the cache come back in the background; got cache_bytes="
                f"{self.cache_bytes} with policy={self.policy!r}: set policy='background'"
            )
