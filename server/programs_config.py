"""Options of `servax serve` and `servax warmup` about programs; nothing here imports JAX."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ProgramsConfig(BaseModel):
    """What is warmed, in which order, and what is kept and checked.

    Attributes:
        policy: what a request does whose bucket is not in memory: it runs in a larger one (`strict`), and
            with `background` the better program is made meanwhile and used from then on; with `lazy` nothing
            is warmed before the first request, either.
        cache_bytes: most bytes of programs of a model in memory, unless `strict`; None for no bound.
        memory_budget: bytes for weights and programs, or `auto` for what is free: plan before anything is
            allocated and drop the buckets of least value if need be. None plans nothing.
        budget_seconds: seconds after which the warm-up is enough; the rest follows in the background.
        budget_bytes: bytes of programs beyond which no more are made.
        replay: file of recorded requests, JSON lines such as {"rows": 3, "length": 17}: what they use is
            warmed first.
        check_padding: whether a model that padding changes is refused; costs a few small compiles. None
            means those that `module:attribute` names.
        check_outputs: whether an answer with NaN is refused and counted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["strict", "background", "lazy"] = "strict"
    cache_bytes: int | None = Field(default=None, gt=0)
    memory_budget: str | None = None
    budget_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    budget_bytes: int | None = Field(default=None, gt=0)
    replay: str | None = Field(default=None, min_length=1)
    check_padding: bool | None = None
    check_outputs: bool = False

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _bytes_or_auto(cls, value: Any) -> str | None:
        if value is None or value == "auto" or (str(value).isdecimal() and int(value) > 0):
            return None if value is None else str(value)
        raise ValueError("a memory budget is a number of bytes above 0, or auto")
