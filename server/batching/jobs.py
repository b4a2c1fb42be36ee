"""What a device thread does beside batches: time a program, change a grid, let a model go."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from ...bucketing import Grid
from ...jit_cache import Program
from ..hosting.model import Model

SHORT_RUN_S = 0.05
_PROBES = 3


@dataclass(frozen=True, slots=True)
class Probe:
    """A warm-up run of one program through the same path as requests, on a full batch.

    The run time of a program that came from the store is known from an earlier start.

    Attributes:
        model: whose.
        program: what is run.
        seconds: how long that took.
        purpose: ``open`` has the model plan with the bucket from now on, ``replace`` has it run this program
            instead of the one it runs there, ``again`` has it plan with what a single run took if that is
            less, ``trial`` changes nothing.
        times: seconds of its runs so far; the shortest counts.
    """

    model: Model
    program: Program
    seconds: "Future[float]"
    purpose: str = "open"
    times: list[float] = field(default_factory=list)

    @property
    def unsure(self) -> bool:
        """Whether it runs once more; the first run pays for buffers, and any may be disturbed."""
        if self.purpose == "again":
            return False
        return len(self.times) < _PROBES and sum(self.times) < 2 * SHORT_RUN_S

    def tell(self, seconds: float) -> None:
        """Have the model know; device thread."""
        if self.purpose == "open":
            self.model.opened(self.program.bucket, seconds)
        elif self.purpose == "replace":
            self.model.replace_program(self.program, seconds)
        elif self.purpose == "again":
            self.model.timed_again(self.program, seconds)

    def fail(self, error: Exception) -> None:
        """It will not be run."""
        self.seconds.set_exception(error)


@dataclass(frozen=True, slots=True)
class Swap:
    """Another grid for a model, to be put in place between two batches."""

    model: Model
    grid: Grid
    done: "Future[None]"

    def fail(self, error: Exception) -> None:
        """It will not be done."""
        self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Retire:
    """A model that gave way; told once the last of its requests has landed."""

    model: Model
    done: "Future[None]"

    def fail(self, error: Exception) -> None:
        """The server ends, and with it the model."""
        self.done.set_exception(error)
