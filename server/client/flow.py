"""One call as a generator: it says what to send and how long to pause, and is told what came. No I/O.

The blocking and the asynchronous client drive the same generator, so that they cannot differ.
"""

import random
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import BadRequest, DeadlineExceeded, NotReady, ServerError
from .asks import Ask, Headers, Reply, probe
from .errors import error_of
from .retry import Budget, Retry

T = TypeVar("T")
_MOST_S = 1e6  # eleven days: every timer takes it


@dataclass(frozen=True, slots=True)
class Send:
    """Send this, and wait at most `left_s` seconds for the answer."""

    method: str
    path: str
    headers: Headers
    body: bytes
    left_s: float
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


Flow = Generator[Send | Pause, Reply | ServerError | None, T]


@dataclass(slots=True)
class Rules:
    """What holds for every call of a client.

    Attributes:
        retry: see `Retry`.
        timeout_s: of one call in all, retries and pauses included.
        headers: of every request.
        budget: shared by the calls.
        now: monotonic seconds.
        jitter: draws from [0, 1).
    """

    retry: Retry
    timeout_s: float
    headers: Headers
    now: Callable[[], float]
    jitter: Callable[[], float] = random.random
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.retry)

    def allowed_s(self, timeout_s: float | None) -> float:
        """Seconds that a call has; raises `BadRequest` if that is none."""
        allowed = self.timeout_s if timeout_s is None else timeout_s
        if not 0 < allowed <= _MOST_S:
            raise BadRequest(
                f"timeout_s is more than 0 seconds, got {allowed}; leave it out for the default."
            )
        return allowed


def run(
    ask: Ask[T], rules: Rules, *, timeout_s: float | None = None, request_id: str | None = None
) -> Flow[T]:
    """Try until there is an answer, the error is one that no retry cures, or too much was spent.

    Args:
        ask: what.
        rules: of the client.
        timeout_s: of this call; None takes the client's.
        request_id: under which the server logs it, the same for each try; None makes one.

    Raises:
        ServerError: what the server said, `Unreachable` or `DeadlineExceeded`; notes tell of the tries.
    """
    named = request_id if request_id is not None else uuid.uuid4().hex
    headers = {**rules.headers, "x-request-id": named}
    deadline_s = rules.now() + rules.allowed_s(timeout_s)
    last: ServerError | None = None
    tries = 0
    while (left_s := deadline_s - rules.now()) > 0:
        more, body = ask.body(left_s)
        tries += 1
        outcome = yield Send(ask.method, ask.path, {**headers, **more}, body, left_s, ask.streams)
        if isinstance(outcome, Reply) and (outcome.status < 400 or outcome.status in ask.statuses):
            rules.budget.refund()
            return ask.read(outcome)
        last = _failure(outcome)
        last.request_id = last.request_id or named
        yield Pause(_pause_s(rules, last, tries, deadline_s - rules.now()))
    late = DeadlineExceeded(f"A call must end within timeout_s, got no answer in {tries} tries; allow more.")
    late.request_id = named
    raise late from last


def _failure(outcome: Reply | ServerError | None) -> ServerError:
    if isinstance(outcome, Reply):
        return error_of(outcome.status, outcome.headers, outcome.body)
    return outcome or ServerError("What was sent must be answered, got nothing; report it.")


def _pause_s(rules: Rules, error: ServerError, tries: int, left_s: float) -> float:
    """Seconds until the next try; where there is none it raises the error, with a note on what was tried."""
    why = ""
    wait_s = rules.retry.wait_s(tries, error, rules.jitter)
    if wait_s is not None:
        if wait_s >= left_s:
            why = f": another one in {wait_s:.3g} s would come after the deadline"
        elif rules.budget.take():
            return wait_s
        else:
            why = ": the client's retry budget is used up"
    error.add_note(f"request {error.request_id}, {tries} {'try' if tries == 1 else 'tries'}{why}")
    raise error


def until_ready(rules: Rules, path: str, timeout_s: float) -> Flow[Mapping[str, object]]:
    """Ask a health probe until it says yes; what it says then.

    Raises:
        NotReady: the time is over; the message has the last thing that was heard.
    """
    deadline_s = rules.now() + timeout_s
    heard, wait_s = "nothing", 0.05
    asked = probe(path)
    while (left_s := deadline_s - rules.now()) > 0:
        outcome = yield Send("GET", path, rules.headers, b"", left_s)
        if isinstance(outcome, Reply):
            if outcome.status >= 400 and outcome.status not in asked.statuses:
                raise error_of(outcome.status, outcome.headers, outcome.body)
            good, said = asked.read(outcome)
            if good:
                return dict(said)
            heard = str(said.get("message") or said.get("state") or said)
        else:
            heard = str(outcome)
        wait_s = min(2 * wait_s, 2.0, max(0.0, deadline_s - rules.now()))
        yield Pause(wait_s)
    raise NotReady(f"The server must be ready within {timeout_s:g} s, got: {heard}; allow more time.")
