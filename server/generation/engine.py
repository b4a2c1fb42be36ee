"""The loop of the device thread: decide, launch, read, deliver.

The next step is launched before the tokens of the one before are read: the device feeds itself, and reading,
text and bookkeeping happen while it works. A sequence that turns out to have ended has taken part in at most
that one step more, whose row is thrown away.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batching.clock import Clock
from ..errors import Cancelled, ModelError, ServerError
from .books import Books, Work
from .desk import Desk, late
from .launches import Launch, Member
from .output import TokenLogprobs
from .programs import Programs
from .rows import LENGTH
from .sequence import Generation, State

_log = logging.getLogger(__name__)
_RETRIES = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One launched program, as told to `on_step`.

    Attributes:
        kind: `decode`, `prefill`, `mixed` or `verify`.
        rows: rows of the program; `real` of them are sequences.
        real: see `rows`.
        tokens: real tokens in it.
        computed: tokens computed, padding included.
        seconds: from its launch until it was read.
        free_pages: that could be taken after the launch.
        drafted: tokens of it that were guesses; `accepted` of those were right.
        accepted: see `drafted`.
    """

    kind: str
    rows: int
    real: int
    tokens: int
    computed: int
    seconds: float
    free_pages: int
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Flight:
    launches: list[tuple[Launch, Any]]
    begun_s: float

    @property
    def guesses(self) -> bool:
        """Whether it says only when it is read how far its texts have come."""
        return any(launch.key.kind == "verify" for launch, _ in self.launches)


class Engine:
    """Runs sequences until its desk is closed. All methods but the desk's are the device thread's.

    Args:
        books: what runs and what it holds.
        programs: compiled, with a state.
        desk: where requests come from.
        clock: source of time.
        depth: steps in flight; 2 launches the next one before the last one is read.
        on_step: told of each program that was read; must not block.
    """

    def __init__(
        self,
        books: Books,
        programs: Programs,
        desk: Desk,
        clock: Clock,
        *,
        depth: int = 2,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.books, self.programs, self.desk, self._clock = books, programs, desk, clock
        self._depth, self._on_step = depth, on_step
        self._flights: deque[_Flight] = deque()
        self._landed_s = 0.0
        self.steps = 0

    def run(self) -> None:
        """Work until the desk is closed."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """One step: take what came, launch, read the oldest step; False once the desk is closed."""
        busy = bool(self._flights) or not self.books.idle
        news = self.desk.take(block=not busy)
        if news is None:
            self._close()
            return False
        for one in news.added:
            self.books.add(one)
        for one in news.cancelled:
            self._end(one, State.CANCELLED, Cancelled("the caller left before the text was complete"))
        for one, state, error in news.ended:
            self._end(one, state, error)
        for one in self.desk.due(self._clock.now()):
            self._end(one, State.EXPIRED, late())
        launched = self._launch()
        if self._flights and (not launched or len(self._flights) >= self._depth):
            self._land(self._flights.popleft())
        elif not launched and not self._flights and self.books.waiting:
            self._end(
                next(iter(self.books.waiting)), State.FAILED, ModelError("this request cannot be placed")
            )
        self.desk.flush(self.books)
        return True

    # -- launch -------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        if self._flights and (self._flights[-1].guesses or self.books.awaits()):
            return False
        flight, work = _Flight([], self._clock.now()), Work()
        try:
            decided, found = self.books.plan()
            if decided.empty and not decided.preempt:
                return False
            self.books.carry_out(decided, found, work)
            for one, error in work.failed:
                self._end(one, State.FAILED, _failure(error))
            self.desk.show(self.books)
            flight.launches = [(launch, None) for launch in work.launches]
            self.programs.copy(work.copies)
            for fill in work.fills:
                self.programs.fill(*fill)
            for at, launch in enumerate(work.launches):
                flight.launches[at] = (launch, self.programs.step(launch.key, launch.inputs))
                self.steps += 1
        except Exception as error:
            # Sequences are booked as launched before the launch, which may have been what failed.
            flight.launches = [(launch, None) for launch in work.launches]
            self._flights.append(flight)
            self._recover(error)
            return True
        if flight.launches:
            self._flights.append(flight)
        return True

    # -- read ---------------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        try:
            read = [(launch, _read(launch, out)) for launch, out in flight.launches]
        except Exception as error:
            self._flights.appendleft(flight)
            self._recover(error)
            return
        now_s = self._clock.now()
        drafting = self.books.drafting
        if drafting is not None and len(read) == 1 and drafting.weighs(key := read[0][0].key):
            drafting.pace.note(key, now_s - max(flight.begun_s, self._landed_s))
        self._landed_s = now_s
        for launch, out in read:
            for row, member in enumerate(launch.members):
                self._member(member, row, out)
            self._tell(launch, out, self._clock.now() - flight.begun_s)

    def _member(self, member: Member, row: int, out: dict[str, np.ndarray]) -> None:
        one = member.who
        over, taken = one.over, int(out["taken"][row]) if "taken" in out else None
        self.books.landed(member, taken)
        if over:
            return
        try:
            for step in range(member.chosen if taken is None else taken):
                if not out["finite"][step, row]:
                    raise ModelError("the model's logits were not finite for this request")
                if self._token(one, int(out["tokens"][step, row]), _logprobs(one, out, step, row)):
                    return
            self.books.publish(one)
        except Exception as error:  # of this request alone: its neighbours go on
            self._end(one, State.FAILED, _failure(error))

    def _token(self, one: Generation, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a token; whether it was the last one."""
        delta = one.take(token, logprobs)
        last = delta.finish_reason is not None
        if last:
            self.books.publish(one)
            self.books.end(one, State.DONE)
        self.desk.send(one, delta)
        return last

    def _tell(self, launch: Launch, out: dict[str, np.ndarray], seconds: float) -> None:
        if self._on_step is None:
            return
        key, rows, taken = launch.key, len(launch.members), out.get("taken")
        tokens = int(launch.inputs["ints"][:, LENGTH].sum()) * (key.chunk if key.kind == "decode" else 1)
        record = StepRecord(
            key.kind,
            key.rows,
            rows,
            tokens,
            key.tokens,
            seconds,
            self.books.cache.available,
            drafted=0 if taken is None else tokens - rows,
            accepted=0 if taken is None else int(taken[:rows].sum()) - rows,
        )
        try:
            self._on_step(record)
        except Exception:  # somebody else's code; it may cost a number, but not the loop
            _log.exception("on_step failed")

    # -- ends ---------------------------------------------------------------------------------------

    def _end(self, one: Generation, state: State, error: ServerError) -> None:
        if not one.over:
            self.books.end(one, state)
            self.desk.send(one, error)

    def _recover(self, error: Exception) -> None:
        """A launched step failed as a whole: everyone in flight is computed again, once."""
        _log.error("a step failed", exc_info=error)
        hit: dict[int, Generation] = {}
        for flight in self._flights:
            for launch, _ in flight.launches:
                for member in launch.members:
                    hit[id(member.who)] = member.who
                    self.books.landed(member)
        self._flights.clear()
        lost = self.programs.lost or bool(hit)
        for one in list(self.books.running.values()):
            if id(one) in hit and one.retries >= _RETRIES:
                self._end(one, State.FAILED, _failure(error))
                continue
            one.retries += id(one) in hit
            self.books.preempt(one)
        if lost:  # also where an array of a failed step is poisoned, which shows at the next use only
            self.books.cache.clear()
            self.programs.reset()

    def _close(self) -> None:
        for flight in self._flights:
            for launch, _ in flight.launches:
                for member in launch.members:
                    self.books.landed(member)
        self._flights.clear()
        for one in [*self.books.waiting, *self.books.running.values()]:
            self._end(one, State.FAILED, self.desk.cut())
        self.desk.flush(self.books)


def _read(launch: Launch, out: Any) -> dict[str, np.ndarray]:
    """Wait for a step; its tokens, and what else somebody asked for."""
    read = {"tokens": np.asarray(out.tokens), "finite": np.asarray(out.finite)}
    if launch.key.kind == "verify":
        read["taken"] = np.asarray(out.taken)
    if any(member.who.params.logprobs is not None for member in launch.members):
        for name in ("logprobs", "top_ids", "top_logprobs"):
            read[name] = np.asarray(getattr(out, name))
    return read


def _logprobs(one: Generation, out: dict[str, np.ndarray], step: int, row: int) -> TokenLogprobs | None:
    wanted = one.params.logprobs
    if wanted is None:
        return None
    ids: Sequence[int] = out["top_ids"][step, row, :wanted].tolist()
    values: Sequence[float] = out["top_logprobs"][step, row, :wanted].tolist()
    top = tuple(zip(ids, values, strict=True))
    return TokenLogprobs(int(out["tokens"][step, row]), float(out["logprobs"][step, row]), top)


def _failure(error: Exception) -> ServerError:
    if isinstance(error, ServerError):
        return error
    first_line = (str(error).strip() or "no message").split("\n", 1)[0]
    made = ModelError(f"generation failed on this request with {type(error).__name__}: {first_line}")
    made.__cause__ = error
    return made
