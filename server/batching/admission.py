"""Admission: whether a request may join the queue. Pure arithmetic on what waits."""

from dataclasses import dataclass

from ..errors import Closed, ConfigError, Overloaded, PayloadTooLarge, ServerError, TooManyRows
from .request import Request


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on what may wait, over all models of a server.

    Attributes:
        rows: most rows waiting for a launch.
        elements: most real elements (tokens, pixels) waiting for a launch; None for no bound.
        bytes: most bytes of the inputs of requests that have a row waiting; None for no bound.
        client_rows: most rows of one client waiting for a launch, so that one that floods the queue leaves
            room for others; None for no bound.
        fair: whether clients take turns, each priority by itself; those that name no client share one turn.
    """

    rows: int = 4096
    elements: int | None = None
    bytes: int | None = None
    client_rows: int | None = None
    fair: bool = False

    def __post_init__(self) -> None:
        given = [one for one in (self.elements, self.bytes, self.client_rows) if one is not None]
        if min(self.rows, *given, 1) < 1:
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


def admit(
    limits: QueueLimits,
    load: Load,
    request: Request,
    *,
    client_rows: int = 0,
    retry_after_s: float = 1.0,
) -> None:
    """Refuse a new request that passes a bound; changes nothing.

    Args:
        limits: the bounds.
        load: what waits.
        request: the newcomer.
        client_rows: how many rows of its client wait.
        retry_after_s: advice that goes with a refusal.

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
    if limits.client_rows is not None and client_rows + request.waiting_rows > limits.client_rows:
        _refuse("rows of one client", limits.client_rows, client_rows, request.waiting_rows, retry_after_s)


def half_full(limits: QueueLimits, load: Load) -> bool:
    """Whether more than half of some bound is taken."""
    taken = ((load.rows, limits.rows), (load.elements, limits.elements), (load.bytes, limits.bytes))
    return any(most is not None and 2 * used > most for used, most in taken)


def check_window(limits: QueueLimits, max_rows: int, max_wait_s: float) -> None:
    """Refuse a window that can never be cut short by a full batch, so that every batch waits it out.

    Raises:
        ConfigError: naming the two options.
    """
    if max_wait_s > 0 and limits.rows < max_rows:
        raise ConfigError(
            f"a full batch must fit the queue where max_wait_ms is set, or each one waits in vain; got "
            f"queue.rows {limits.rows} below max_batch {max_rows}: raise queue.rows, or lower max_batch or "
            f"max_wait_ms"
        )


def _refuse(what: str, limit: int, waiting: int, wanted: int, retry_after_s: float) -> None:
    if wanted > limit:
        kind = PayloadTooLarge if what == "bytes" else TooManyRows
        raise kind(f"the queue holds at most {limit} {what}; the request alone has {wanted}: send several")
    raise Overloaded(
        f"the queue holds at most {limit} {what}; {waiting} wait and the request has {wanted}: retry after "
        f"{retry_after_s:.3g} s",
        retry_after_s,
        "client" if "client" in what else what,
    )


def draining() -> ServerError:
    """What those hear who come while the server drains."""
    return Closed("a draining server takes no new requests; it is shutting down: use another replica")


def closed() -> ServerError:
    """What those hear who wait when the server closes."""
    return Closed("the server closed before it could answer: retry elsewhere")


def displaced(retry_after_s: float) -> ServerError:
    """What a request hears that gave way."""
    return Overloaded(
        f"the queue is full and a more urgent request came: retry after {retry_after_s:.3g} s",
        retry_after_s,
        "displaced",
    )


def too_late(slack_s: float, wait_s: float, retry_after_s: float) -> ServerError:
    """What a request hears whose answer is predicted to come after its deadline."""
    return Overloaded(
        f"an answer must come within the {slack_s:.3g} s that callers have; what waits before it takes "
        f"about {wait_s:.3g} s: retry after {retry_after_s:.3g} s, or allow more time",
        retry_after_s,
        "deadline",
    )
