"""What the engine asks of a language model; `servax.models.GenerativeModel` is one.

Pages 0 and 1 of a pool hold no sequence: padded table entries name `NULL_PAGE`, which is read and masked,
and padded rows write to `SINK_PAGE`, so that reading and writing never meet.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

NULL_PAGE = 0
SINK_PAGE = 1
FIRST_PAGE = 2


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text as they come."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """Text still held; the sequence is over."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """The ids of each text."""
        ...

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for one sequence."""
        ...


class LanguageModel(Protocol):
    """A decoder with a paged KV pool.

    One with `mixed_step` as well reads prompts in the step that decodes: `mixed_step(params, kv, *, ids,
    further_ids, further, reads, page_table, context_lengths, chunk_lengths)`, see
    `servax.models.llama.mixed_step`. One with `verify_step` can check guesses of several tokens in one step:
    arguments as of `step`, logits float32 `(rows, chunk, vocab)` after every token.

    Attributes:
        name: the name it is served by.
        params: tree of arrays.
        limits: `tokens`, the longest sequence, prompt and continuation together.
        tokenizer: text to ids and back.
        eos_ids: tokens that end a text.
        vocab_size: width of the logits.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def params(self) -> Any: ...  # noqa: D102
    @property
    def limits(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102
    @property
    def eos_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def step(self) -> Any:
        """Pure `step(params, kv, *, ids, page_table, context_lengths, chunk_lengths)`.

        `ids` is int32 `(rows, chunk)`, `page_table` int32 `(rows, max_pages)`, the lengths int32 `(rows,)`.
        It gives float32 logits `(rows, vocab)` after each row's last real token, and the pool.
        """
        ...

    @property
    def kv_shapes(self) -> Any:
        """`kv_shapes(pages=, page_size=)` to a dict of `ShapeDtypeStruct`, pages on axis 1 of each."""
        ...


Tree = Any
Cache = dict[str, jax.Array]
