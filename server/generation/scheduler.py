"""What the next step does: a pure function of what runs, what waits and what memory there is.

A step reads one chunk of prompts and decodes every row that can, in one program if that costs less. Decoding
rows get memory first, and a chunk is bounded, so a long prompt delays a running text by one chunk a
token and never by its length. Waiting sequences join at any step. When memory is short the least urgent of
the running ones gives its pages up and is computed again later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .chunking import Bucket, Prompt, choose
from .drafting import Draft


@dataclass(frozen=True, slots=True)
class Running:
    """A running sequence, as far as a decision needs it.

    Attributes:
        key: names it.
        rank: smaller is more urgent.
        context: tokens in the pool once all launched steps have run.
        target: tokens that must be in the pool before it decodes.
        left: tokens that may still be chosen.
        pages: pages it holds.
        returns: pages that can be taken by others if it lets go.
    """

    key: int
    rank: tuple[int, int]
    context: int
    target: int
    left: int
    pages: int
    returns: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting sequence.

    Attributes:
        key: names it.
        rank: smaller is more urgent.
        tokens: to read before its next token is chosen.
        room: tokens to have pages for when it begins: one more than `tokens` if it will decode.
        cached: pages of them that are in the prefix cache; `idle` of those nobody holds.
        idle: see `cached`.
        copied: 1 if the last cached page must be copied first, else 0.
        start: tokens that need not be read.
        ready: False while a launched step that names it was not read.
    """

    key: int
    rank: tuple[int, int]
    tokens: int
    room: int
    cached: int = 0
    idle: int = 0
    copied: int = 0
    start: int = 0
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What does not change.

    Attributes:
        page_size: tokens in a page.
        max_rows: sequences that run at once.
        buckets: prefill programs.
        steps: decode steps in one launch where nobody can join or leave; 1 for never more.
        mixed: programs that read prompts while others decode: rows, and tokens beside theirs.
        decode_rows: of the decode programs, rising.
    """

    page_size: int
    max_rows: int
    buckets: tuple[Bucket, ...]
    steps: int = 1
    mixed: tuple[Bucket, ...] = ()
    decode_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one prompt to read, and whether its first token is chosen then."""

    key: int
    length: int
    last: bool


@dataclass(slots=True)
class Plan:
    """One step. The parts are carried out in this order.

    Attributes:
        preempt: sequences that give their pages up.
        admit: waiting sequences that begin to run, with all the pages of their prompt.
        grow: pages to add to decoding rows, by key.
        bucket: the program that reads prompts, or None.
        mixed: whether it decodes as well.
        chunks: what it reads.
        decode: rows that decode.
        steps: how many steps of it.
        draft: guesses that are checked in that step; None for none.
    """

    preempt: list[int] = field(default_factory=list)
    admit: list[int] = field(default_factory=list)
    grow: dict[int, int] = field(default_factory=dict)
    bucket: Bucket | None = None
    mixed: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    steps: int = 1
    draft: Draft | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not self.chunks and not self.decode


def plan(
    running: Sequence[Running],
    waiting: Iterable[Waiting],
    *,
    queued: bool,
    available: int,
    slots: int,
    limits: Limits,
) -> Plan:
    """Decide the next step.

    Args:
        running: in any order; those that have nothing left to choose are only waited for.
        waiting: the most urgent first; read no further than the first that cannot begin.
        queued: whether anything waits.
        available: pages that can be taken.
        slots: places in the state that can be taken.
        limits: what does not change.
    """
    out = Plan()
    active = sorted((row for row in running if row.left > 0), key=lambda row: row.rank)
    out.steps = 1 if queued else _steps(active, available, limits)
    ending = len(active) < len(running)
    available = _decode(out, active, ending, available, limits)
    kept = [row for row in active if row.key not in out.preempt]
    prompts = [
        (row.key, Prompt(row.target - row.context, row.context > 0))
        for row in kept
        if row.context < row.target
    ]
    if not out.preempt:
        prompts += _admit(out, kept, waiting, available, slots, limits)
    if prompts:
        left = [one for _, one in prompts]
        choice = choose(limits.buckets, limits.mixed, left, len(out.decode), limits.decode_rows)
        out.bucket, out.mixed = choice.bucket, choice.mixed
        for (key, one), length in zip(prompts, choice.lengths, strict=False):
            if length:
                out.chunks.append(Chunk(key, length, length == one.left))
    return out


def _missing(row: Running, steps: int, page_size: int) -> int:
    """Pages that a decoding row lacks for its next steps."""
    return max(-(-(row.context + steps) // page_size) - row.pages, 0)


def _steps(active: Sequence[Running], available: int, limits: Limits) -> int:
    """Several steps at once if nobody can join or leave in between and memory is there."""
    steps = limits.steps
    if steps == 1 or not active:
        return 1
    for row in active:
        if row.context < row.target or row.left < steps:
            return 1
    if sum(_missing(row, steps, limits.page_size) for row in active) > available:
        return 1
    return steps


def _decode(out: Plan, active: Sequence[Running], ending: bool, available: int, limits: Limits) -> int:
    """Give each decoding row its next page, from the least urgent rows if need be; pages left then."""
    rows = list(active)
    at = 0
    while at < len(rows):
        row = rows[at]
        at += 1
        if row.context < row.target:
            continue
        missing = _missing(row, out.steps, limits.page_size)
        while missing > available and rows[-1] is not row and not ending:
            victim = rows.pop()
            out.preempt.append(victim.key)
            available += victim.returns
        if missing > available:
            if not ending:  # the least urgent of those that are left: it makes room for the others
                out.preempt.append(rows.pop().key)
                available += row.returns
            continue  # else those whose last token is on its way give their pages back when it is read
        available -= missing
        if missing:
            out.grow[row.key] = missing
        out.decode.append(row.key)
    return available


def _admit(
    out: Plan,
    kept: Sequence[Running],
    waiting: Iterable[Waiting],
    available: int,
    slots: int,
    limits: Limits,
) -> list[tuple[int, Prompt]]:
    """Begin what fits, in order; nobody overtakes one that waits for memory."""
    begun: list[tuple[int, Prompt]] = []
    rows = len(kept)
    for one in waiting:
        if not one.ready or rows >= limits.max_rows or slots <= 0:
            break
        fresh = -(-one.room // limits.page_size) - one.cached + one.copied
        # Room for running rows to grow, or a newcomer would soon push out, or be, the least urgent one.
        spare = -(-rows // 4) if rows else 0
        if fresh + one.idle + spare > available:
            break
        available -= fresh + one.idle
        rows, slots = rows + 1, slots - 1
        out.admit.append(one.key)
        begun.append((one.key, Prompt(one.tokens - one.start, one.start > 0)))
    return begun
