"""The workload `embed`: one text a request over HTTP, from clients that wait and by the clock."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExperimentError
from ..traces import load_texts, load_trace
from .load import Outcome, closed_loop, open_loop
from .place import Place
from .processes import ask_once
from .shapes import SHAPES
from .table import Peer
from .up import Up, in_turn, up

Row = dict[str, Any]
Tell = Callable[[str], None]
_ASK_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        clients: how many wait at once, one series each.
        texts: requests in one turn.
        turns: how often each of the two systems has its turn.
        limit_ms: p99 that the highest sustained rate must keep.
        steps: halvings in the search for that rate; 0 leaves it out.
        step_s: seconds of each step.
        arrivals: `poisson`, or the name of a trace whose bursts are kept.
        seed: of texts and arrivals.
    """

    clients: tuple[int, ...] = (1, 16, 64)
    texts: int = 400
    turns: int = 3
    limit_ms: float = 250.0
    steps: int = 5
    step_s: float = 8.0
    arrivals: str = "poisson"
    seed: int = 0


@dataclass(frozen=True)
class Reference:
    """Texts and the vectors that every system must give for them."""

    texts: Sequence[str]
    vectors: NDArray[np.float64]
    source: str


def measure(
    peers: Sequence[Peer], place: Place, plan: Plan, golden: Path | None, tell: Tell
) -> Iterator[Row]:
    """Each peer against servax, which takes turns with all of them.

    Args:
        peers: the first is servax.
        place: where they run.
        plan: what is measured.
        golden: folder with reference texts and vectors; without one, servax's answers are the reference.
        tell: told what happens.

    Yields:
        One row a start (`mode` is `start`), one a turn (`closed`), one a search (`open`); a peer that fails
        gives a row with `error`.
    """
    texts = [one.text for one in load_texts(seed=plan.seed)]
    with up(peers[0], place, _request(peers[0], texts[0])) as ours:
        reference = _reference(golden, ours, texts[:64])
        yield _started(ours, reference)
        for peer in peers[1:]:
            tell(f"{peer.name}: installing and starting")
            try:
                with up(peer, place, _request(peer, texts[0])) as theirs:
                    yield _started(theirs, reference)
                    yield from _turns(ours, theirs, plan, texts, tell)
            except ExperimentError as error:
                tell(f"{peer.name}: {error}")
                yield {"system": peer.name, "workload": "embed", "mode": "start", "error": str(error)}


def _turns(ours: Up, theirs: Up, plan: Plan, texts: Sequence[str], tell: Tell) -> Iterator[Row]:
    pairs = ((ours, theirs), (theirs, ours))
    top = {ours: 0.0, theirs: 0.0}

    def closed(one: Up, other: Up, sent: Sequence[str], clients: int) -> Outcome:
        requests = _requests(one, sent)
        return in_turn(one, other, lambda it: closed_loop(it.port, requests, clients))

    for one, other in pairs:  # what the measured turns would else meet for the first time
        closed(one, other, texts[-96:], 16)
    for clients, count in itertools.product(plan.clients, range(plan.turns)):
        for one, other in pairs:
            outcome = closed(one, other, texts[: plan.texts], clients)
            top[one] = max(top[one], outcome.rate)
            tell(f"{one.peer.name}, {clients} clients: {outcome.rate:.1f}/s")
            yield _row(one, theirs, outcome) | {"mode": "closed", "clients": clients, "turn": count}
    for one, other in pairs if plan.steps else ():
        found = _highest(one, other, plan, texts, 1.1 * top[one])
        tell(f"{one.peer.name}, by the clock: {0.0 if found is None else found[0]:.1f}/s")
        row: Row = {"system": one.peer.name, "against": theirs.peer.name, "workload": "embed"}
        if found is not None:
            row = _row(one, theirs, found[1])
        yield row | {"mode": "open", "rate": 0.0 if found is None else found[0]}


def _highest(
    one: Up, other: Up, plan: Plan, texts: Sequence[str], top: float
) -> tuple[float, Outcome] | None:
    """The highest offered rate whose p99 keeps the limit, and its outcome; None if no rate did."""

    def offer(rate: float) -> Outcome:
        count = max(100, round(rate * plan.step_s))
        due_s = arrivals(plan.arrivals, count, rate, plan.seed)
        requests = _requests(one, [texts[i % len(texts)] for i in range(count)])
        return in_turn(one, other, lambda it: open_loop(it.port, requests, due_s))

    return highest_rate(offer, top, plan.limit_ms, plan.steps)


def highest_rate(
    offer: Callable[[float], Outcome], top: float, limit_ms: float, steps: int
) -> tuple[float, Outcome] | None:
    """Search a rate between 0 and `top` by halving.

    Args:
        offer: what becomes of requests at a rate.
        top: a rate that is too high or just not.
        limit_ms: the p99 to keep; a request without an answer breaks it.
        steps: halvings; the result is within `top / 2 ** steps`.

    Returns:
        The rate and its outcome, or None if no rate was kept.
    """
    low, high, best = 0.0, top, None
    for _ in range(steps):
        rate = (low + high) / 2
        outcome = offer(rate)
        if outcome.percentile_ms(99) <= limit_ms:
            low, best = rate, (rate, outcome)
        else:
            high = rate
    return best


def arrivals(kind: str, count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Rising seconds of so many requests at a mean rate.

    Args:
        kind: `poisson`, or a packaged trace: its arrivals, brought to the rate.
        count: how many.
        rate: a second.
        seed: of Poisson arrivals.
    """
    if kind == "poisson":
        return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    found = load_trace(kind).part(0, count).at_rate(rate, seed).arrivals_s
    if found is None or len(found) < count:
        raise ExperimentError(f"The trace must have {count} arrivals; {kind!r} has fewer: ask for less.")
    return found


def _row(one: Up, theirs: Up, outcome: Outcome) -> Row:
    lost = len(outcome.seconds) - outcome.answered
    return {
        "system": one.peer.name,
        "against": theirs.peer.name,
        "workload": "embed",
        "rate": outcome.rate,
        "requests": len(outcome.seconds),
        "p50_ms": _finite(outcome.percentile_ms(50)),
        "p99_ms": _finite(outcome.percentile_ms(99)),
        "failed": lost,
        "statuses": {str(status): count for status, count in sorted(outcome.statuses.items())},
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _request(peer: Peer, text: str) -> bytes:
    return SHAPES[peer.shape].request(text)


def _requests(one: Up, texts: Sequence[str]) -> list[bytes]:
    return [_request(one.peer, text) for text in texts]


# -- answers -------------------------------------------------------------------------------------------


def _started(one: Up, reference: Reference) -> Row:
    got = vectors_of(one, reference.texts)
    cosine = (got * reference.vectors).sum(1) / np.linalg.norm(got, axis=1)
    return {
        "system": one.peer.name,
        "workload": "embed",
        "mode": "start",
        "start_s": one.start_s,
        "cosine_min": float(cosine.min()),
        "reference": reference.source,
    }


def vectors_of(one: Up, texts: Sequence[str]) -> NDArray[np.float64]:
    """A server's vectors, asked for one by one.

    Raises:
        ExperimentError: if it refuses a text.
    """
    shape, found = SHAPES[one.peer.shape], []
    for text in texts:
        status, answer = ask_once(one.port, shape.request(text), _ASK_S)
        if status != 200:
            raise ExperimentError(
                f"{one.peer.name} must embed every reference text; it said {status}: {answer[:300]}"
            )
        found.append(shape.vector(json.loads(answer)))
    return np.array(found, np.float64)


def _reference(golden: Path | None, ours: Up, texts: Sequence[str]) -> Reference:
    if golden is None:
        return Reference(texts, vectors_of(ours, texts), "servax")
    rows = json.loads((golden / "minilm_texts.json").read_text())
    vectors = np.load(golden / "minilm_embeddings.npy").astype(np.float64)
    return Reference([row["text"] for row in rows], vectors, "golden")
