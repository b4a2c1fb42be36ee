"""The workload `decode`: greedy completions of real texts, streamed, many at once."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...models import registry
from ...models.generative import GenerativeModel
from ..errors import ExperimentError
from ..traces import load_texts
from .load import ANSWER_S
from .place import Place
from .processes import ask_once
from .shapes import completion
from .table import Peer
from .up import Up, in_turn, up

Row = dict[str, Any]
Tell = Callable[[str], None]
# Where the two best logits are closer, another order of summation may choose the other.
_TIE = 1e-3
_CHECKED = 12
_ASK_S = 120.0


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        clients: streams at once, one series each.
        prompt_tokens: of each prompt.
        tokens: that each stream writes.
        turns: how often each of the two systems has its turn.
        seed: of the choice of texts.
    """

    clients: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 64
    tokens: int = 64
    turns: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed answer: seconds of each piece since it was asked for, and its tokens."""

    pieces_s: list[float]
    tokens: int


def measure(
    peers: Sequence[Peer], place: Place, plan: Plan, golden: Path | None, tell: Tell
) -> Iterator[Row]:
    """Each peer against servax, which takes turns with all of them.

    Args:
        peers: the first is servax.
        place: where they run.
        plan: what is measured.
        golden: folder with reference continuations; without one, agreement is not told.
        tell: told what happens.

    Yields:
        Rows of the modes `start` and `streams`; a peer that fails gives a row with `error`.
    """
    prompts = _prompts(plan)
    with up(peers[0], place, _request(peers[0], "Hello", 2)) as ours:
        yield _started(ours, golden)
        for peer in peers[1:]:
            tell(f"{peer.name}: installing and starting")
            try:
                with up(peer, place, _request(peer, "Hello", 2)) as theirs:
                    yield _started(theirs, golden)
                    yield from _turns(ours, theirs, plan, prompts, tell)
            except ExperimentError as error:
                tell(f"{peer.name}: {error}")
                yield {"system": peer.name, "workload": "decode", "mode": "start", "error": str(error)}


def _turns(ours: Up, theirs: Up, plan: Plan, prompts: Sequence[str], tell: Tell) -> Iterator[Row]:
    pairs = ((ours, theirs), (theirs, ours))

    def turn(one: Up, other: Up, clients: int) -> Row:
        sent = [prompts[i % len(prompts)] for i in range(max(clients, 2))]
        begin_s = time.perf_counter()
        found = in_turn(one, other, lambda it: streams(it, sent, clients, plan.tokens))
        return _row(one, theirs, found, time.perf_counter() - begin_s)

    for clients in plan.clients:
        for one, other in pairs:  # what the measured turns would else meet for the first time
            turn(one, other, clients)
        for count in range(plan.turns):
            for one, other in pairs:
                row = turn(one, other, clients)
                tell(f"{one.peer.name}, {clients} streams: {row['rate']:.1f} tokens/s")
                yield row | {"clients": clients, "turn": count}


async def streams(it: Up, prompts: Sequence[str], clients: int, tokens: int) -> list[Stream]:
    """So many clients, each of which asks for its next text when the last has ended.

    Raises:
        ExperimentError: if a stream breaks or is refused.
    """
    waiting, found = iter(prompts), []

    async def client() -> None:
        for prompt in waiting:
            one = await stream(it.port, _request(it.peer, prompt, tokens, stream=True), it.peer.name)
            found.append(one)

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def stream(port: int, request: bytes, name: str) -> Stream:
    """Read one streamed answer (server-sent events) to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pieces_s: list[float] = []
    tokens, begin_s = 0, time.perf_counter()
    try:
        async with asyncio.timeout(5 * ANSWER_S):
            writer.write(request)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ExperimentError(f"{name} must stream; it said {status!r} {await reader.read(500)!r}")
            while (line := await reader.readline()) and line.strip() != b"data: [DONE]":
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if any(choice.get("text") for choice in event.get("choices", ())):
                    pieces_s.append(time.perf_counter() - begin_s)
    except (OSError, TimeoutError, ValueError) as error:
        raise ExperimentError(
            f"{name} must stream to the end; got {error!r} after {len(pieces_s)} pieces."
        ) from error
    finally:
        writer.close()
    return Stream(pieces_s, tokens or len(pieces_s))


def _row(one: Up, theirs: Up, found: Sequence[Stream], wall_s: float) -> Row:
    first = [it.pieces_s[0] for it in found if it.pieces_s]
    between = np.concatenate([np.diff(it.pieces_s) for it in found])
    tokens = sum(it.tokens for it in found)
    return {
        "system": one.peer.name,
        "against": theirs.peer.name,
        "workload": "decode",
        "mode": "streams",
        "rate": tokens / wall_s,
        "tokens": tokens,
        "p50_ms": float(np.percentile(between, 50)) * 1e3,
        "p99_ms": float(np.percentile(between, 99)) * 1e3,
        "first_p50_ms": float(np.percentile(first, 50)) * 1e3,
        "first_p99_ms": float(np.percentile(first, 99)) * 1e3,
    }


def _request(peer: Peer, prompt: str | list[int], tokens: int, *, stream: bool = False) -> bytes:
    return completion(peer.shape.partition(":")[2], prompt, tokens, stream=stream)


def _prompts(plan: Plan) -> list[str]:
    """Beginnings of real texts, of exactly so many tokens where the tokenizer gives them back."""
    model = registry.load("smollm2")
    if not isinstance(model, GenerativeModel):
        raise ExperimentError(f"smollm2 is a language model; got {type(model).__name__}.")
    found = []
    for text in load_texts(seed=plan.seed):
        ids = model.tokenizer.encode([text.text])[0]
        if len(ids) >= plan.prompt_tokens:
            found.append(model.tokenizer.decode(ids[: plan.prompt_tokens].tolist()))
    return found


# -- answers -------------------------------------------------------------------------------------------


def _started(one: Up, golden: Path | None) -> Row:
    row: Row = {"system": one.peer.name, "workload": "decode", "mode": "start", "start_s": one.start_s}
    if golden is None:
        return row
    shares: list[float] = []
    for case in json.loads((golden / "smollm2_greedy.json").read_text()):
        if case["kind"] != "completion" or len(shares) == _CHECKED:
            continue
        if case["text"].startswith("<|"):
            continue
        until = next((i for i, gap in enumerate(case["top2_gap"]) if gap < _TIE), len(case["tokens"]))
        status, answer = ask_once(one.port, _request(one.peer, case["prompt"], max(until, 1)), _ASK_S)
        if status != 200:
            raise ExperimentError(
                f"{one.peer.name} must complete every prompt; it said {status}: {answer[:300]}"
            )
        got = json.loads(answer)["choices"][0]["text"]
        # Servers leave the model's marks out of the text, so it is compared up to the first one.
        text, mark, _ = case["text"].partition("<|")
        shares.append(common_share(text, got, 1.0 if mark else until / len(case["tokens"])))
    return row | {"agreement": float(np.mean(shares)), "reference": "golden"}


def common_share(expected: str, got: str, part: float = 1.0) -> float:
    """The share of the first `part` of a text that another text begins with."""
    wanted = expected[: max(1, int(len(expected) * part))]
    same = next(
        (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got))
    )
    return same / len(wanted)
