"""A language model of whole numbers, for tests: no JAX, and a rule that one can work out by hand.

Its keys and values are the tokens themselves, kept in pages as a real model keeps them, and its next token
is a hash of all tokens that it finds there. A page that is lost, shared wrongly, given out twice or read
before it was written therefore shows in the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import rows as r
from .programs import Key, Shapes
from .seam import NULL_PAGE, SINK_PAGE

_UNWRITTEN = -1
_MODULUS = (1 << 31) - 1


class FakeTokenizer:
    """Token `i` is the character `i + 32`; 0 and 1 are marks without text."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [np.array([ord(character) - 32 for character in text], np.int32) for text in texts]

    def stream(self, *, skip_special: bool = True) -> "FakeDetokenizer":
        """A detokenizer for one sequence."""
        return FakeDetokenizer()


class FakeDetokenizer:
    """Characters, one a token."""

    def push(self, ids: Iterable[int]) -> str:
        """Text of these tokens."""
        return "".join([chr(token + 32) for token in ids if token > 1])

    def flush(self) -> str:
        """Nothing is ever held."""
        return ""


class FakeModel:
    """What the engine asks of a model, beside its programs.

    Args:
        vocab_size: tokens; 1 ends a text.
        max_tokens: longest sequence.
        words: tokens that it chooses are smaller; few of them repeat.
    """

    name = "fake"
    params: Mapping[str, Any] = {}
    eos_ids = (1,)
    step = None
    mixed_step = verify_step = True
    kv_shapes = None

    def __init__(self, vocab_size: int = 64, max_tokens: int = 256, words: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.words = vocab_size if words is None else words
        self.limits = {"tokens": max_tokens}
        self.tokenizer = FakeTokenizer()


def next_token(tokens: Sequence[int], vocab: int, seed: int = 0, step: int = 0) -> int:
    """The rule: a hash of the whole sequence, and of seed and step for one that draws."""
    value = seed % _MODULUS + 7919 * step if seed else 0
    for token in tokens:
        value = (value * 31 + token + 1) % _MODULUS
    return 1 + (value * 48271) % _MODULUS % (vocab - 1)


class FakePrograms:
    """Stands in for `Programs` in an `Engine`.

    Attributes:
        log: key and row sizes of each step.
        broken: steps (counted from 0) that raise instead of running.
        poisoned: slots whose logits are not finite, by step.
    """

    def __init__(self, model: FakeModel, shapes: Shapes) -> None:
        self._vocab, self._words, self._shapes = model.vocab_size, model.words, shapes
        self.log: list[tuple[Key, int]] = []
        self.broken: set[int] = set()
        self.poison: Any = None
        self.lost = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        one = self._shapes
        self._pool = np.full((one.pages, one.page_size), _UNWRITTEN)
        self._last = np.full(one.slots + 1, _UNWRITTEN)
        self._seen = np.zeros((one.slots + 1, self._vocab), np.int64)
        self.lost = False

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages."""
        for source, target in pairs:
            self._pool[target] = self._pool[source]

    def fill(self, slot: int, prompt: np.ndarray, text: np.ndarray) -> None:
        """Write token counts."""
        counts = [np.bincount(part, minlength=self._vocab) for part in (text, prompt)]
        self._seen[slot] = counts[0] + (counts[1] << 16)

    def step(self, key: Key, batch: Mapping[str, np.ndarray]) -> SimpleNamespace:
        """Run at once."""
        if len(self.log) in self.broken:
            self.broken.discard(len(self.log))
            self.log.append((key, 0))
            self.lost = True
            raise RuntimeError("the device is out of luck")
        ints = batch["ints"].copy()
        self.log.append((key, int((ints[:, r.LENGTH] > 0).sum())))
        if key.kind == "verify":
            return self._verify(key, batch, ints)
        steps = key.chunk if key.kind == "decode" else 1
        tokens = np.zeros((steps, key.rows), np.int32)
        finite = np.ones((steps, key.rows), bool)
        for step in range(steps):
            for row in range(key.rows):
                ids = self._ids(key, batch, row, ints[row])
                tokens[step, row], finite[step, row] = self._row(ints[row], batch, row, ids)
            ints[:, [r.CONTEXT, r.STEP]] += ints[:, r.LENGTH, None]
        return self._said(tokens, finite)

    def _verify(self, key: Key, batch: Mapping[str, np.ndarray], ints: np.ndarray) -> SimpleNamespace:
        """A row's token and its guesses one after another, and those behind a wrong one for nothing."""
        tokens = np.zeros((key.chunk, key.rows), np.int32)
        finite, taken = np.ones((key.chunk, key.rows), bool), np.zeros(key.rows, np.int32)
        for row, of_row in enumerate(ints):
            guesses, stands = batch["guesses"][row], of_row[r.LENGTH] > 0
            ids, count = np.append(self._last[of_row[r.SLOT]], guesses), of_row[r.LENGTH]
            for place in range(count):
                one = of_row.copy()
                one[[r.CONTEXT, r.STEP]] += place
                one[r.LENGTH], one[r.SAMPLE] = 1, stands
                tokens[place, row], finite[place, row] = self._row(one, batch, row, ids[place : place + 1])
                taken[row] += stands
                stands = stands and place + 1 < count and tokens[place, row] == guesses[place]
        return self._said(tokens, finite, taken=taken)

    def _said(self, tokens: np.ndarray, finite: np.ndarray, **more: np.ndarray) -> SimpleNamespace:
        zeros = np.zeros((*tokens.shape, self._shapes.tops), np.float32)
        return SimpleNamespace(
            **more,
            tokens=tokens,
            finite=finite,
            logprobs=zeros[..., 0],
            top_ids=zeros.astype(int),
            top_logprobs=zeros,
        )

    def _ids(self, key: Key, batch: Mapping[str, np.ndarray], row: int, ints: np.ndarray) -> np.ndarray:
        """The tokens of a row's chunk."""
        if key.kind == "prefill":
            chunk: np.ndarray = batch["ids"][row]
            return chunk
        last: np.ndarray = self._last[ints[r.SLOT], None]
        if key.kind == "decode":
            return last
        own = batch["ids"][row, None] if batch["ids"][row] >= 0 else last
        ids, rows, places = batch["further"]
        before = ids[rows == row]
        if places[rows == row].tolist() != list(range(len(before))):
            raise AssertionError("further tokens are in order")
        if len(before) and ints[r.CONTEXT] and row != batch["reads"]:
            raise AssertionError("one row's further tokens have a past")
        return np.concatenate([before, own])

    def _row(
        self, ints: np.ndarray, batch: Mapping[str, np.ndarray], row: int, ids: np.ndarray
    ) -> tuple[int, bool]:
        size, table = self._shapes.page_size, batch["page_table"][row]
        context, length, slot = ints[r.CONTEXT], ints[r.LENGTH], ints[r.SLOT]
        if not length:
            self._pool[SINK_PAGE] = 12345
            return 0, True
        for place in range(length):
            page = table[(context + place) // size]
            if page in (NULL_PAGE, SINK_PAGE):
                raise AssertionError("a real token has no page")
            self._pool[page, (context + place) % size] = ids[place]
        held = self._pool[table[np.arange(context + length) // size], np.arange(context + length) % size]
        if (held < 0).any():
            raise AssertionError("a place was read that was never written")
        return self._choose(held.tolist(), ints, batch["floats"][row], int(slot))

    def _choose(self, held: list[int], ints: np.ndarray, floats: np.ndarray, slot: int) -> tuple[int, bool]:
        seed = int(ints[r.SEED_LOW]) & 0xFFFFFFFF if floats[r.TEMPERATURE] > 0 else 0
        if floats[r.FREQUENCY]:
            counts = self._seen[slot]
            seed += int((counts * np.arange(1, self._vocab + 1)).sum() % _MODULUS)
        token = next_token(held, self._words, seed, int(ints[r.STEP]))
        if ints[r.SAMPLE]:
            self._last[slot] = token
            self._seen[slot, token] += 1
        return token, self.poison is None or not self.poison(held)
