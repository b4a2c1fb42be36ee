"""Which prompts are read together, and how far: pure arithmetic on what is left of each.

A prefill program has `rows` rows of `chunk` tokens. Of the programs there are, the one is taken that reads
most tokens for what it costs, so chunks are cut where a bucket ends and a rest fills a small one.
"""

from collections.abc import Sequence
from typing import NamedTuple

# What a launch costs beside its tokens, in tokens: weights are read once, however few rows they meet.
# SmolLM2 on 2 cores takes 15, 24 and 43 ms for 1, 8 and 32 tokens, and 58 for 64.
OVERHEAD = 20


class Bucket(NamedTuple):
    """Rows and tokens a row of a prefill program; of a mixed program, rows and tokens beside theirs."""

    rows: int
    chunk: int

    @property
    def cost(self) -> int:
        """In tokens."""
        return OVERHEAD + self.rows * self.chunk

    @property
    def mixed_cost(self) -> int:
        """The same of a mixed program."""
        return OVERHEAD + self.rows + self.chunk


def default_buckets(budget: int, max_rows: int) -> tuple[Bucket, ...]:
    """One row or as many as the budget allows, of the budget, a half and an eighth of it.

    Of five programs these cost least on Azure's conversation prompts at a sixteenth of their length: 7 % less
    than a quarter and a sixteenth of the budget if prompts come alone, 10 % if eight wait.

    Args:
        budget: most tokens in one launch.
        max_rows: most rows that can need it.
    """
    chunks = {max(budget // part, 1) for part in (1, 2, 8)}
    return tuple(
        sorted({Bucket(rows, chunk) for chunk in chunks for rows in (1, min(budget // chunk, max_rows))})
    )


def default_mixed(budget: int, max_rows: int) -> tuple[Bucket, ...]:
    """Programs that read prompts while others decode: all rows or a quarter, with much or little beside.

    Args:
        budget: most tokens of prompts in one launch.
        max_rows: that run at once.
    """
    few = max_rows // 4
    beside = {(max_rows, budget), (max_rows, budget // 4), (few, budget - few), (few, budget // 4)}
    return tuple(sorted(Bucket(rows, chunk) for rows, chunk in beside if rows > 1 and chunk > 0))


class Prompt(NamedTuple):
    """What is left to read of one, and whether tokens of it are in the pool."""

    left: int
    past: bool


class Choice(NamedTuple):
    """A program, whether it is a mixed one, and how many tokens of each prompt it reads, in order."""

    bucket: Bucket
    mixed: bool
    lengths: list[int]


def choose(
    buckets: Sequence[Bucket],
    mixed: Sequence[Bucket],
    prompts: Sequence[Prompt],
    decoding: int,
    decode_rows: Sequence[int],
) -> Choice:
    """The program that reads most tokens for the cost of the step; the smaller one of equals.

    Args:
        buckets: prefill programs, at least one; the step then decodes by a program of its own.
        mixed: programs that do both.
        prompts: the most urgent first; at least one.
        decoding: rows that decode in the step.
        decode_rows: of the decode programs, rising.
    """
    alone = 0
    if decoding:
        alone = OVERHEAD + next((rows for rows in decode_rows if rows >= decoding), decoding)

    def worth(choice: Choice) -> tuple[float, int]:
        cost = choice.bucket.mixed_cost if choice.mixed else choice.bucket.cost + alone
        return (sum(choice.lengths) + decoding) / cost, -cost

    choices = [
        Choice(one, False, [min(prompt.left, one.chunk) for prompt in prompts[: one.rows]]) for one in buckets
    ]
    choices += [Choice(one, True, _beside(one, prompts, decoding)) for one in mixed if one.rows > decoding]
    return max((one for one in choices if any(one.lengths)), key=worth)


def _beside(bucket: Bucket, prompts: Sequence[Prompt], decoding: int) -> list[int]:
    """Tokens of each prompt that a mixed program reads: one on a row of its own, the others beside."""
    rows, beside, past = bucket.rows - decoding, bucket.chunk, False
    lengths = []
    for prompt in prompts:
        length = min(prompt.left, beside + 1) if rows > 0 else 0
        # A single token of many is not worth a row, and only one prompt's tokens beside may have a past.
        if (length > 1 and prompt.past and past) or length == 1 < prompt.left:
            length = 0
        past = past or (length > 1 and prompt.past)
        rows, beside = rows - (length > 0), beside - max(length - 1, 0)
        lengths.append(length)
    return lengths
