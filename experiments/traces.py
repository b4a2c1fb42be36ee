"""The packaged traces, lengths and texts, cut into the half to fit on and the half to test on."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from .errors import ExperimentError, UnknownTrace


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Args:
        name: What it is called in tables.
        lengths: `(n,)` int64, tokens of each request, each from 1 to `limit`.
        limit: The longest admissible request, known before the trace is seen.
        arrivals_s: `(n,)` float64, rising seconds; None where only lengths were published.
    """

    name: str
    lengths: NDArray[np.int64]
    limit: int
    arrivals_s: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, begin: int, end: int) -> "Trace":
        """Requests `begin` to `end`, with the clock starting at the first of them."""
        arrivals = None if self.arrivals_s is None else self.arrivals_s[begin:end]
        if arrivals is not None and len(arrivals):
            arrivals = arrivals - arrivals[0]
        return replace(self, lengths=self.lengths[begin:end], arrivals_s=arrivals)

    def halves(self) -> tuple["Trace", "Trace"]:
        """The first half, to fit on, and the second, to test on."""
        middle = len(self) // 2
        return self.part(0, middle), self.part(middle, len(self))

    def scaled(self, factor: float, limit: int | None = None) -> "Trace":
        """Lengths times `factor`, rounded up, at least 1 and cut at the new limit.

        Args:
            factor: Above 0, such as 1/16 to bring long prompts to a small model.
            limit: The new limit; by default the old one times `factor`, rounded up.

        Raises:
            ExperimentError: if the factor is not above 0.
        """
        if not factor > 0:
            raise ExperimentError(f"Lengths are scaled by a factor above 0; got {factor!r}.")
        most = max(1, int(np.ceil(self.limit * factor))) if limit is None else limit
        lengths = np.clip(np.ceil(self.lengths * factor).astype(np.int64), 1, most)
        return replace(self, lengths=lengths, limit=most)

    def at_rate(self, per_s: float, seed: int) -> "Trace":
        """The same requests at another mean rate; bursts keep their shape.

        Args:
            per_s: Requests a second, on average over the trace.
            seed: Seed of the Poisson arrivals of a trace that has none.

        Raises:
            ExperimentError: if the rate is not above 0.
        """
        if not per_s > 0:
            raise ExperimentError(f"A rate is above 0 requests a second; got {per_s!r}.")
        arrivals = self.arrivals_s
        if arrivals is None:
            arrivals = np.cumsum(np.random.default_rng(seed).exponential(size=len(self)))
        span = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
        stretch = len(self) / per_s / span if span else 0.0
        return replace(self, arrivals_s=(arrivals - arrivals[:1]) * stretch)


@dataclass(frozen=True, slots=True)
class Text:
    """One text with its length in MiniLM tokens, special tokens included."""

    text: str
    tokens: int
    source: str
    licence: str


_TRACES = (
    "azure_llm_2023_conv",
    "azure_llm_2023_code",
    "mooncake_fast25_conversation",
    "mooncake_fast25_synthetic",
    "vidur_arxiv_summarization_lengths",
    "servegen_m-small_draw",
)
TEXT_LIMIT = 256
NAMES = (*_TRACES, "texts", "embed_lengths")


def load_trace(name: str, *, column: str = "prompt_tokens", seed: int = 0) -> Trace:
    """A packaged trace.

    Its limit is the smallest power of two that holds it, as a model's context window would be: known
    before any request is seen, and a natural rung of the powers of two. `texts` and `embed_lengths`
    have the limit of MiniLM, 256, at which longer ones are cut. They were collected source by source,
    so they are shuffled.

    Args:
        name: One of `NAMES`.
        column: `prompt_tokens` or `output_tokens`, for the language-model traces.
        seed: Seed of the shuffle.

    Raises:
        UnknownTrace: if there is no such trace or column.
    """
    if name == "texts":
        return Trace(name, _cut([text.tokens for text in load_texts(seed=seed)]), TEXT_LIMIT)
    if name == "embed_lengths":
        lengths = np.array([int(row["minilm_tokens"]) for row in _rows("embed_lengths.csv.gz")], np.int64)
        return Trace(name, _cut(np.random.default_rng(seed).permutation(lengths)), TEXT_LIMIT)
    if name not in _TRACES:
        raise UnknownTrace(f"A trace is one of {', '.join(NAMES)}; got {name!r}.")
    rows = list(_rows(f"{name}.csv.gz"))
    if column not in rows[0]:
        raise UnknownTrace(f"{name} has the columns {', '.join(rows[0])}; got {column!r}.")
    lengths = np.array([int(row[column]) for row in rows], np.int64)
    arrivals = np.array([float(row["arrival_s"]) for row in rows]) if "arrival_s" in rows[0] else None
    return Trace(name, lengths, 1 << (int(lengths.max()) - 1).bit_length(), arrivals)


def load_texts(*, seed: int | None = None) -> list[Text]:
    """The packaged texts, shuffled unless the seed is None."""
    with _opened("texts.jsonl.gz") as lines:
        found = [json.loads(line) for line in lines]
    texts = [Text(one["text"], one["minilm_tokens"], one["source"], one["licence"]) for one in found]
    if seed is None:
        return texts
    return [texts[place] for place in np.random.default_rng(seed).permutation(len(texts)).tolist()]


def _cut(lengths: object) -> NDArray[np.int64]:
    return np.minimum(np.asarray(lengths, np.int64), TEXT_LIMIT)


def _rows(file: str) -> Iterator[dict[str, str]]:
    with _opened(file) as lines:
        yield from csv.DictReader(lines)


@contextmanager
def _opened(file: str) -> Iterator[io.TextIOWrapper]:
    with (
        (files(__package__) / "data" / file).open("rb") as raw,
        gzip.open(raw, "rt", encoding="utf-8") as text,
    ):
        if not isinstance(text, io.TextIOWrapper):
            raise ExperimentError(f"{file} is gzip text.")
        yield text
