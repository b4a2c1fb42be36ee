"""What the models of one server have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from ...bucketing import Bucket
from ...jit_cache import CompileService, Program, Servable
from ..batching.batcher import Policy
from ..batching.clock import Clock
from ..batching.dispatcher import Dispatcher
from ..batching.sinks import Sinks
from ..errors import ConfigError
from .programs import Programs

Compile = Callable[[Servable, Bucket, Sequence[jax.Array]], Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the models of one server have in common; see `Server`.

    Raises:
        ConfigError: on an impossible setting.
    """

    dispatcher: Dispatcher
    compiler: CompileService
    clock: Clock
    sinks: Sinks
    policy: Policy
    max_request_rows: int
    timeout_s: float | None
    ready_when: str
    compile_program: Compile
    programs: Programs = field(default_factory=Programs)

    def __post_init__(self) -> None:
        if self.ready_when not in ("grid", "coverage"):
            raise ConfigError(f"ready_when is 'grid' or 'coverage'; got {self.ready_when!r}")
        if self.max_request_rows < 1:
            raise ConfigError(f"max_request_rows is at least 1; got {self.max_request_rows}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                f"timeout_s is a finite number above 0, or None for no bound; got {self.timeout_s}"
            )
