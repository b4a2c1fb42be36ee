"""Admission: whether a request may join the queue. Pure arithmetic on what waits."""

from dataclasses import dataclass

from .errors import ConfigError, Overloaded


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on what may wait, over all models of a server.

    Attributes:
        rows: most rows waiting for a launch.
        elements: most real elements (tokens, pixels) waiting for a launch; None for no bound.
    """

    rows: int = 4096
    elements: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or (self.elements is not None and self.elements < 1):
            raise ConfigError(f"queue limits are at least 1, so that a request can wait; got {self}")


@dataclass(frozen=True, slots=True)
class Load:
    """What waits: rows and real elements not launched yet."""

    rows: int = 0
    elements: int = 0

    def plus(self, rows: int, elements: int) -> "Load":
        """The load with some more (or, negative, less)."""
        return Load(self.rows + rows, self.elements + elements)


def admit(limits: QueueLimits, load: Load, rows: int, elements: int, *, retry_after_s: float = 1.0) -> Load:
    """The load with a new request in it.

    Raises:
        Overloaded: if a bound would be passed; the load is unchanged.
    """
    if load.rows + rows > limits.rows:
        raise Overloaded(
            f"the queue holds at most {limits.rows} rows; {load.rows} wait and the request has {rows}: retry "
            f"after {retry_after_s:g} s",
            retry_after_s,
        )
    if limits.elements is not None and load.elements + elements > limits.elements:
        raise Overloaded(
            f"the queue holds at most {limits.elements} elements; {load.elements} wait and the request has "
            f"{elements}: retry after {retry_after_s:g} s",
            retry_after_s,
        )
    return load.plus(rows, elements)
