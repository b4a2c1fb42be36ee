"""Errors of the device, told from errors of a model or its input."""

import enum
import math
import re
from dataclasses import dataclass

import jax

from ...bucketing import Bucket
from ..errors import ConfigError, DeviceFailed


class Fault(enum.Enum):
    """What went wrong in a run.

    MEMORY: the device had no room for it. TRANSIENT: the device or its runtime failed, and may work the next
    time. MODEL: the program refused these rows; another run of them would end the same.
    """

    MEMORY = "memory"
    TRANSIENT = "transient"
    MODEL = "model"


# XLA's errors begin with the name of an absl status code.
_CODE = re.compile(r"\s*([A-Z_]+):")
_TRANSIENT = {"INTERNAL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNKNOWN"}


def fault_of(error: BaseException) -> Fault:
    """What kind of error a run raised.

    A host callback that raises comes back as an error of the runtime, with `INTERNAL` and its own traceback:
    that is the model's.
    """
    if isinstance(error, MemoryError):
        return Fault.MEMORY
    if not isinstance(error, jax.errors.JaxRuntimeError) and type(error) is not RuntimeError:
        return Fault.MODEL
    text = str(error)
    code = _CODE.match(text)
    if code is None:
        return Fault.MODEL
    if code[1] == "RESOURCE_EXHAUSTED":
        return Fault.MEMORY
    return Fault.TRANSIENT if code[1] in _TRANSIENT and "allback" not in text else Fault.MODEL


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """What is done about a device that fails.

    Attributes:
        retries: how often a batch that failed for no reason of its own runs again, within the deadlines of
            its requests.
        open_after: so many batches that failed in a row, retries included, and the device is taken for
            broken: requests are refused at once until a trial run works.
        backoff_s: seconds until the first trial; each that fails doubles it.
        most_backoff_s: most seconds between two trials.
        gone_after: so many trials that failed in a row, and the device is taken for gone: `live` turns
            false, so that an orchestrator restarts the process. Trials go on.

    Raises:
        ConfigError: on an impossible setting.
    """

    retries: int = 2
    open_after: int = 3
    backoff_s: float = 1.0
    most_backoff_s: float = 30.0
    gone_after: int = 5

    def __post_init__(self) -> None:
        counts = self.retries >= 0 and self.open_after >= 1 and self.gone_after >= 1
        if not (counts and 0 < self.backoff_s <= self.most_backoff_s < math.inf):
            raise ConfigError(
                f"retries are from 0 up, batches and trials from 1 up, a backoff above 0 s and at most "
                f"most_backoff_s; got {self}: correct it"
            )


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault and what was done about it, for metrics and logs.

    Attributes:
        model: name of the model whose batch failed.
        bucket: where it ran.
        kind: ``memory`` or ``transient``.
        action: ``retried`` (the same rows again), ``halved`` (in two smaller runs), ``blamed`` (a run on
            padding worked, so that the rows are looked at one by one), ``moved`` (to another device),
            ``failed`` (its callers were told),
            ``opened`` (requests are refused from now on), ``trial`` (one failed), ``gone`` (it is not
            expected to come back), ``closed`` (it works again).
        error: the first line of the error; "" if it works again.
    """

    model: str
    bucket: Bucket
    kind: str
    action: str
    error: str = ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]


def device_error(cause: BaseException, *, memory: bool = False) -> DeviceFailed:
    """What the callers of a batch hear that failed for no fault of theirs."""
    if memory:
        text = f"the device had no memory left for this batch, nor for half of it: {first_line(cause)}"
    else:
        text = f"the device failed on this batch and again on retries: {first_line(cause)}"
    error = DeviceFailed(f"{text}: retry, on another replica if there is one")
    error.__cause__ = cause
    return error
