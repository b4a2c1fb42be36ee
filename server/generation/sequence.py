"""A request while it is generated: its tokens, pages and slot, and the table of moves between states."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..batching.request import DEFAULT_PRIORITY, IllegalMove
from ..errors import ServerError
from .drafting import Drafter
from .output import Delta, TokenLogprobs, Usage
from .params import SamplingParams
from .prefix import Entry, Namespace
from .seam import Detokenizer
from .stop import StopScanner


class State(enum.Enum):
    """Where a sequence is. Everything but WAITING and RUNNING is final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_OVER = frozenset({State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED})
# A running one that gives up its pages waits again; a step launched before that may still end its text.
MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING}) | _OVER,
    State.RUNNING: frozenset({State.WAITING}) | _OVER,
    **dict.fromkeys(_OVER, frozenset()),
}


class Sink(Protocol):
    """Where a sequence's deltas go."""

    def deliver(self, event: "Delta | ServerError") -> None:
        """Take the next delta, or the error that ended the stream; must not block."""
        ...


class Generation:
    """One continuation.

    Attributes:
        prompt: int32 `(n,)`.
        params: what was asked.
        sink: who is told.
        rank: order of service: priority, then arrival.
        client: whose share of the queue it uses; "" for nobody's.
        deadline_s: on the server's clock; infinity for none.
        namespace: whose prefixes it may share.
        most: tokens to generate at most, `params.max_tokens` within the limits.
        seed: of its draws.
        stop_ids: tokens that end it.
        state: see `MOVES`; changed by `move` only.
        text: tokens generated and read.
        pending: tokens chosen in launched steps that were not read.
        context: tokens whose keys and values are in the pool once the launched steps have run.
        read: of those, how many were there at the last step that was read.
        target: tokens to be in the pool before the next one is chosen by decoding.
        pages: its pages, in order.
        entries: published entries of its first pages.
        published: False once a page of it could not be published, so none behind it can.
        slot: place in the state, or None.
        flying: launched steps that name it and were not read.
        epoch: how often it gave its pages up.
        retries: how often a step that named it failed.
        cached: tokens of the prompt that were found in the prefix cache, at the first admission.
        banked: deltas that are sent at the end, if it does not stream.
        drafter: guesses its next tokens; None where nothing is guessed.
    """

    __slots__ = (
        "banked", "cached", "client", "context", "deadline_s", "detokenizer", "drafter", "entries", "epoch",
        "flying", "most", "namespace", "pages", "params", "pending", "prompt", "published", "rank", "read",
        "retries", "scanner", "seed", "sink", "slot", "state", "stop_ids", "streams", "target", "text",
    )  # fmt: skip

    def __init__(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        sink: Sink,
        order: int,
        most: int,
        seed: int,
        stop_ids: Sequence[int],
        detokenizer: Detokenizer,
        priority: int = DEFAULT_PRIORITY,
        deadline_s: float = math.inf,
        namespace: Namespace | None = None,
        streams: bool = True,
        client: str = "",
    ) -> None:
        self.prompt, self.params, self.sink = prompt, params, sink
        self.rank, self.client = (priority, order), client
        self.most, self.seed, self.stop_ids = most, seed, frozenset(stop_ids)
        self.deadline_s = deadline_s
        self.namespace = namespace if namespace is not None else Namespace()
        self.detokenizer, self.scanner = detokenizer, StopScanner(params.stop)
        self.streams, self.banked = streams, list[Delta]()
        self.drafter: Drafter | None = None
        self.state = State.WAITING
        self.text: list[int] = []
        self.pending = self.context = self.read = self.flying = self.epoch = self.retries = 0
        self.target = len(prompt)
        self.pages: list[int] = []
        self.entries: list[Entry] = []
        self.published = True
        self.slot: int | None = None
        self.cached: int | None = None

    @property
    def priority(self) -> int:
        """1 (most urgent) to 9."""
        return self.rank[0]

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state in _OVER

    @property
    def place(self) -> int:
        """Its slot, which one that runs has.

        Raises:
            RuntimeError: it has none.
        """
        if self.slot is None:
            raise RuntimeError("a sequence in a step has a slot; this one has none")
        return self.slot

    @property
    def left(self) -> int:
        """Tokens that may still be chosen after the launched steps."""
        return self.most - len(self.text) - self.pending

    def move(self, state: State) -> None:
        """Go to another state.

        Raises:
            IllegalMove: the table does not allow it; nothing changes.
        """
        if state not in MOVES[self.state]:
            allowed = sorted(one.value for one in MOVES[self.state]) or "nothing"
            raise IllegalMove(f"one that is {self.state.value} may become {allowed}; got {state.value}")
        self.state = state

    def tokens(self) -> np.ndarray:
        """Prompt and text, int32."""
        return np.concatenate([self.prompt, np.asarray(self.text, np.int32)]) if self.text else self.prompt

    def take(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Add a token that was read; the delta to send, with a reason in it if it is the last one."""
        self.text.append(token)
        if self.drafter is not None:
            self.drafter.push(token)
        known = (logprobs,) if logprobs is not None else ()
        stopped = token in self.stop_ids and len(self.text) > self.params.min_tokens
        text = self.scanner.push("" if stopped else self.detokenizer.push((token,)))
        over = stopped or len(self.text) >= self.most
        if over:
            text += self.scanner.push(self.detokenizer.flush())
        if found := self.scanner.found:
            return self._last(token, text, known, "stop", found)
        if over:
            text += self.scanner.flush()
            return self._last(token, text, known, "stop" if stopped else "length", token if stopped else None)
        return Delta((token,), text, known)

    def _last(
        self, token: int, text: str, known: tuple[TokenLogprobs, ...], reason: str, why: str | int | None
    ) -> Delta:
        usage = Usage(len(self.prompt), len(self.text), self.cached or 0)
        return Delta((token,), text, known, reason, why, usage)
