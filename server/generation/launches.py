"""From sequences to a program's inputs on the host: which program, its arrays, and whose row is which."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .chunking import Bucket
from .pages import PagePool
from .programs import Key
from .rows import CONTEXT, LENGTH, SAMPLE, STEP, Inputs, RowTable, no_tokens
from .scheduler import Chunk
from .sequence import Generation
from .slots import Slots


class Member(NamedTuple):
    """A sequence in a launched step.

    Attributes:
        who: the sequence.
        epoch: of its pages then.
        read: tokens in the pool once the step has run.
        chosen: tokens that the step chooses for it, at most if it checks guesses.
    """

    who: Generation
    epoch: int
    read: int
    chosen: int


class Launch(NamedTuple):
    """One program to launch: which, its inputs, and whose rows they are."""

    key: Key
    inputs: Inputs
    members: list[Member]


Part = tuple[Generation, Chunk]


class Launcher:
    """Makes launches and books their tokens as launched.

    Args:
        table: per-row data by slot.
        slots: places in the state.
        pool: pages.
        decode_rows: sizes of the decode programs, rising.
    """

    def __init__(self, table: RowTable, slots: Slots, pool: PagePool, decode_rows: Sequence[int]) -> None:
        self._table, self._slots, self._pool = table, slots, pool
        self._decode_rows = tuple(decode_rows)

    def prefill(self, bucket: Bucket, parts: Sequence[Part]) -> Launch:
        """A chunk of each of these sequences."""
        key = Key("prefill", *bucket)
        tokens = no_tokens(key)
        for row, (one, chunk) in enumerate(parts):
            tokens["ids"][row, : chunk.length] = _tokens(one, chunk)
        return self._launch(key, parts, tokens)

    def decode(self, ones: Sequence[Generation], steps: int) -> Launch:
        """One token, or a few, of each."""
        rows = self._decode_rows[bisect.bisect_left(self._decode_rows, len(ones))]
        parts = [(one, Chunk(one.rank[1], 1, last=True)) for one in _ordered(ones)]
        return self._launch(Key("decode", rows, steps), parts, {}, steps)

    def verify(self, bucket: Bucket, ones: Sequence[Generation], guesses: Sequence[Sequence[int]]) -> Launch:
        """One token of each and those that may follow; how many stand is known once it is read."""
        key = Key("verify", *bucket)
        tokens, parts = no_tokens(key), []
        told = {one.rank[1]: guess for one, guess in zip(ones, guesses, strict=True)}
        for row, one in enumerate(_ordered(ones)):
            guess = told[one.rank[1]]
            tokens["guesses"][row, : len(guess)] = guess
            parts.append((one, Chunk(one.rank[1], 1 + len(guess), last=True)))
        return self._launch(key, parts, tokens, guessed=True)

    def mixed(self, bucket: Bucket, parts: Sequence[Part], ones: Sequence[Generation]) -> Launch:
        """A token of each of `ones` and the chunks of `parts`."""
        key = Key("mixed", *bucket)
        tokens, at = no_tokens(key), 0
        tokens["ids"][:] = -1
        chunks = {one.rank[1]: chunk for one, chunk in parts}
        ordered = []
        for row, one in enumerate(_ordered([*ones, *(one for one, _ in parts)])):
            chunk = chunks.get(one.rank[1])
            ordered.append((one, chunk or Chunk(one.rank[1], 1, last=True)))
            if chunk is None:
                continue
            *before, tokens["ids"][row] = _tokens(one, chunk)
            if before:
                some = slice(at, at := at + len(before))
                tokens["further"][:, some] = before, [row] * len(before), range(len(before))
                if one.context:
                    tokens["reads"] = np.array(row, np.int32)
        return self._launch(key, ordered, tokens)

    def _launch(
        self, key: Key, parts: Sequence[Part], tokens: Inputs, steps: int = 1, *, guessed: bool = False
    ) -> Launch:
        ints = self._table.ints
        slots = [one.place for one, _ in parts]
        for slot, (_, chunk) in zip(slots, parts, strict=True):
            ints[slot, LENGTH], ints[slot, SAMPLE] = chunk.length, chunk.last
        inputs = self._table.inputs(slots, key.rows, self._pool) | tokens
        ints[slots, CONTEXT] += ints[slots, LENGTH] * steps
        ints[slots, STEP] += ints[slots, SAMPLE] * steps
        members = [
            self._launched(one, chunk.length * steps, chunk.length if guessed else chunk.last * steps)
            for one, chunk in parts
        ]
        return Launch(key, inputs, members)

    def _launched(self, one: Generation, tokens: int, chosen: int) -> Member:
        one.context += tokens
        one.pending += chosen
        one.flying += 1
        self._slots.launched(one.place)
        return Member(one, one.epoch, one.context, chosen)


def _ordered(ones: Sequence[Generation]) -> list[Generation]:
    """The longest first: rows that read their pages together are then of one length."""
    return sorted(ones, key=lambda one: one.context, reverse=True)


def _tokens(one: Generation, chunk: Chunk) -> list[int]:
    tokens: list[int] = one.tokens()[one.context : one.context + chunk.length].tolist()
    return tokens
