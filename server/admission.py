"""Admission: whether a request may join the queue. Pure arithmetic on what waits."""

from dataclasses import dataclass

from .errors import ConfigError, Overloaded, PayloadTooLarge, TooManyRows
from .request import Request


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on what may wait, over all models of a server.

    Attributes:
        rows: most rows waiting for a launch.
        elements: most real elements (tokens, pixels) waiting for a launch; None for no bound.
        bytes: most bytes of the inputs of requests that have a row waiting; None for no bound.
    """

    rows: int = 4096
    elements: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.rows, *(limit for limit in (self.elements, self.bytes) if limit is not None), 1) < 1:
            raise ConfigError(f"queue limits are at least 1, so that a request can wait; got {self}")


@dataclass(slots=True)
class Load:
    """What waits: rows and real elements not launched yet, and the bytes of their requests' inputs."""

    rows: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, rows: int, elements: int, nbytes: int) -> None:
        """Count some more, or, negative, less."""
        self.rows += rows
        self.elements += elements
        self.bytes += nbytes

    def copy(self) -> "Load":
        """A snapshot."""
        return Load(self.rows, self.elements, self.bytes)


def admit(limits: QueueLimits, load: Load, request: Request, *, retry_after_s: float = 1.0) -> None:
    """Refuse a new request that passes a bound; changes nothing.

    Raises:
        Overloaded: if it does not fit beside what waits now.
        TooManyRows, PayloadTooLarge: if it would not fit into an empty queue either, so that to retry is
            no use.
    """
    if load.rows + request.waiting_rows > limits.rows:
        _refuse("rows", limits.rows, load.rows, request.waiting_rows, retry_after_s)
    if limits.elements is not None and load.elements + request.waiting_elements > limits.elements:
        _refuse("elements", limits.elements, load.elements, request.waiting_elements, retry_after_s)
    if limits.bytes is not None and load.bytes + request.nbytes > limits.bytes:
        _refuse("bytes", limits.bytes, load.bytes, request.nbytes, retry_after_s)


def _refuse(what: str, limit: int, waiting: int, wanted: int, retry_after_s: float) -> None:
    if wanted > limit:
        kind = PayloadTooLarge if what == "bytes" else TooManyRows
        raise kind(f"the queue holds at most {limit} {what}; the request alone has {wanted}: send several")
    raise Overloaded(
        f"the queue holds at most {limit} {what}; {waiting} wait and the request has {wanted}: retry after "
        f"{retry_after_s:g} s",
        retry_after_s,
    )
