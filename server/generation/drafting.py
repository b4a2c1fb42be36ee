"""Guessing ahead: tokens that a text is likely to go on with, checked several at once in one step.

A text that quotes its prompt or itself goes on as it went on there: what followed the last place with the
same last tokens is a good guess, and costs no second model (prompt lookup decoding, Saxena 2023). Checking
guesses in one step is due to Leviathan et al. 2023, arXiv:2211.17192. A guess stands where the sampler, with
the seed and step that the token has anyway, chooses the same, so a text is the one it is without guesses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .chunking import Bucket
from .params import SamplingParams
from .programs import Key

_LONGEST = 3  # tokens at the end of a text that are looked for in it
# How often a guess is right after a match of one, two, three tokens, until it is known of a text.
_PRIOR = (0.3, 0.5, 0.7)
_WEIGHT = 0.1  # of one guess that was checked
_PACE_WEIGHT = 0.2  # of one run
_MOST = 2.0  # times what is known that one run counts, or a single pause would decide for long
_PULL = 0.005  # of each run, on programs that were not run
# A step that is read before the next one is launched leaves the device idle for a moment.
_LEAST_GAIN = 1.05


class Drafter:
    """Guesses for one text, and how often they were right.

    Args:
        prompt: int32 `(n,)`.
        most: tokens that will be added at most.
        length: tokens to guess at most.
    """

    def __init__(self, prompt: np.ndarray, most: int, length: int) -> None:
        self._tokens = np.empty(len(prompt) + most, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._count, self._length = len(prompt), length
        self._odds = list(_PRIOR)
        self._guess: list[int] | None = None
        self._unchecked: list[int] = []
        self._matched = 0

    @property
    def odds(self) -> float:
        """How often a token of the present guess is right, given that those before it are."""
        return self._odds[self._matched - 1]

    def push(self, token: int) -> None:
        """Add a token; a guess of it is checked, whether a step tried it or not."""
        if self._unchecked:
            right = self._unchecked[0] == token
            at = self._matched - 1
            self._odds[at] += _WEIGHT * (right - self._odds[at])
            self._unchecked = self._unchecked[1:] if right else []
        self._tokens[self._count] = token
        self._count += 1
        self._guess = None

    def guess(self) -> list[int]:
        """Tokens that may follow; none if the last one is new."""
        if self._guess is None:
            at, self._matched = self._match()
            self._guess = self._unchecked = self._from(at) if self._matched else []
        return self._guess

    def _match(self) -> tuple[int, int]:
        """The place behind the last match of the most tokens, up to `_LONGEST`, and how many those are."""
        known = self._tokens[: self._count]
        ends = np.flatnonzero(known[:-1] == known[-1])
        at = matched = 0
        while len(ends):
            at, matched = int(ends[-1]) + 1, matched + 1
            if matched == min(_LONGEST, self._count - 1):
                return at, matched
            ends = ends[ends >= matched]
            ends = ends[known[ends - matched] == known[-1 - matched]]
        return at, matched

    def _from(self, at: int) -> list[int]:
        """What followed there; behind the end of the text the guess follows itself."""
        found: list[int] = self._tokens[at : min(at + self._length, self._count)].tolist()
        while len(found) < self._length:
            found.append(found[at + len(found) - self._count])
        return found


def drafter(prompt: np.ndarray, params: SamplingParams, most: int, length: int) -> Drafter | None:
    """Who guesses for a text; nobody if penalties make its tokens depend on those before them."""
    return Drafter(prompt, most, length) if length and not params.penalized else None


class Draft(NamedTuple):
    """A step that checks guesses.

    Attributes:
        bucket: rows, and tokens a row: its last one and guesses.
        guesses: of each text, in the order they were given.
    """

    bucket: Bucket
    guesses: list[list[int]]


class Pace:
    """Seconds that a run of each program takes, as they were lately.

    One that is not run is believed to be faster with time, down to where it would be if it had become as much
    slower since its first run as the one that is. Or one that was slow for a while, when others used the
    device, would never be tried again.
    """

    def __init__(self) -> None:
        self._first: dict[Key, float] = {}
        self._seconds: dict[Key, float] = {}

    def note(self, key: Key, seconds: float) -> None:
        """A run ended."""
        if not seconds > 0:
            return
        first = self._first.setdefault(key, seconds)
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _PACE_WEIGHT * (min(seconds, _MOST * known) - known)
        slower = self._seconds[key] / first
        for other, held in self._seconds.items():
            if other != key:
                self._seconds[other] = held + _PULL * min(slower * self._first[other] - held, 0.0)

    def of(self, key: Key) -> float | None:
        """None if it was never run."""
        return self._seconds.get(key)


class Drafting:
    """Decides when guesses are checked: when that gives more tokens a second than steps of one.

    Args:
        buckets: of the programs that check: rows, and tokens a row.
        decode_rows: of the decode programs, rising.
    """

    def __init__(self, buckets: Sequence[Bucket], decode_rows: Sequence[int]) -> None:
        self._buckets = sorted(buckets)
        self._decode_rows = tuple(decode_rows)
        self.rows = max(bucket.rows for bucket in buckets)
        self.length = max(bucket.chunk for bucket in buckets) - 1
        self._alone = next(size for size in decode_rows if size >= self.rows)
        self.pace = Pace()

    def weighs(self, key: Key) -> bool:
        """Whether `choose` asks what this program takes."""
        return key.kind == "verify" or (key.kind == "decode" and key.rows <= self._alone)

    def choose(self, drafters: Sequence[Drafter | None], left: Sequence[int], steps: int = 1) -> Draft | None:
        """The best step for these texts, or None if tokens chosen one by one are better.

        Args:
            drafters: of each text; None where nothing is guessed.
            left: tokens that may still be chosen, of each.
            steps: tokens of each that are chosen in one launch without guesses.
        """
        rows = len(drafters)
        if not 0 < rows <= self.rows:
            return None
        pairs = list(zip(drafters, left, strict=True))
        guesses = [[] if one is None else one.guess()[: most - 1] for one, most in pairs]
        longest = max(map(len, guesses))
        alone = self.pace.of(Key("decode", next(size for size in self._decode_rows if size >= rows), steps))
        if not longest or alone is None:
            return None
        odds = [0.0 if one is None else one.odds for one in drafters]
        best, gain = None, _LEAST_GAIN * rows * steps / alone
        for bucket in self._buckets:
            seconds = self.pace.of(Key("verify", *bucket))
            if bucket.rows < rows or seconds is None:
                continue
            tokens = sum(
                expected(chance, min(len(guess), bucket.chunk - 1))
                for chance, guess in zip(odds, guesses, strict=True)
            )
            if tokens / seconds > gain:
                best, gain = bucket, tokens / seconds
        return None if best is None else Draft(best, [guess[: best.chunk - 1] for guess in guesses])


def expected(odds: float, length: int) -> float:
    """Tokens that a step gives on average: its own, and guesses up to the first that is wrong.

    Each guess is right with probability `odds` if those before it were: 1 + p + ... + p^length.
    """
    return float(sum(odds**place for place in range(length + 1)))


def verify_buckets(tokens: int, rows: int) -> tuple[Bucket, ...]:
    """Programs for guesses of up to `tokens` of up to `rows` texts.

    Powers of two of rows; guesses whole, and of three where that is fewer: a processor reads the weights for
    4 tokens about as fast as for 1, and for 16 it computes longer than it reads.
    """
    sizes = sorted({1 << power for power in range(rows.bit_length())} | {rows})
    chunks = sorted({min(4, tokens + 1), tokens + 1})
    most = max(4 * rows, tokens + 1)
    return tuple(
        Bucket(size, chunk) for size in sizes if size <= rows for chunk in chunks if size * chunk <= most
    )
