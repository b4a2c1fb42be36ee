"""Text to token ids, by the `tokenizers` library; cutting is explicit and never happens by itself."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from .errors import BadText, BadTokenIds, CheckpointError, TooManyTokens

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


class TextTokenizer:
    """Tokenizes texts for one model.

    Attributes:
        max_tokens: the model's limit, special tokens included; only `truncate` and callers apply it.
        vocab_size: ids the model knows; valid ids are 0 to `vocab_size - 1`.
        pad_id: the id that stands for padding.
        special_tokens: how many tokens are added around each text.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, vocab_size: int, pad_id: int) -> None:
        # A tokenizer.json carries its own cutting and padding; both would be silent here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        self._front, self._back = _frame(tokenizer)
        self.special_tokens = len(self._front) + len(self._back)
        if self.special_tokens >= max_tokens:
            raise CheckpointError(
                f"max_tokens must leave room beside the {self.special_tokens} special tokens, "
                f"got {max_tokens}: raise the limit"
            )
        if tokenizer.get_vocab_size(with_added_tokens=True) > vocab_size:
            raise CheckpointError(
                "the tokenizer must not give ids the model lacks, got "
                f"{tokenizer.get_vocab_size(with_added_tokens=True)} tokens for {vocab_size} rows of the "
                "word table: check that tokenizer.json and config.json belong together"
            )

    @classmethod
    def from_file(cls, path: Path, *, max_tokens: int, vocab_size: int, pad_id: int) -> "TextTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            CheckpointError: the file is absent or malformed, or does not fit the model.
        """
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{path.name} must be a tokenizers file, got {error} in {path.parent}: "
                "save the model's fast tokenizer"
            ) from error
        return cls(tokenizer, max_tokens=max_tokens, vocab_size=vocab_size, pad_id=pad_id)

    @cached_property
    def digest(self) -> str:
        """Of all that decides its ids: two tokenizers of one digest give the same."""
        facts = (self._tokenizer.to_str(), self.max_tokens, self.vocab_size, self.pad_id)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Tokenize whole texts, special tokens included, neither cut nor padded.

        Args:
            texts: any number of texts, of any length.

        Returns:
            One int32 `(tokens,)` array a text, in order.

        Raises:
            BadText: an item is no text, or holds surrogates without a partner.
        """
        if isinstance(texts, str):
            raise BadText("texts must be a sequence of texts, got a single one: pass [text]")
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts))
        except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
            raise _bad_text(texts, error) from error
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def truncate(
        self, ids: Any, max_tokens: int | None = None, side: Literal["left", "right"] = "right"
    ) -> Ids:
        """Cut to at most `max_tokens`, keeping the special tokens at both ends.

        Args:
            ids: one row of token ids; special tokens are recognised where present, never added.
            max_tokens: the most to keep; the model's limit if None.
            side: which side of the text is cut away.

        Returns:
            int32 `(<= max_tokens,)`.

        Raises:
            BadTokenIds: see `check`.
            TooManyTokens: `max_tokens` leaves no room for text.
        """
        row = self.check(ids)
        limit = self.max_tokens if max_tokens is None else max_tokens
        if limit <= self.special_tokens:
            raise TooManyTokens(
                f"max_tokens must leave room beside the {self.special_tokens} special tokens, "
                f"got {limit}: raise it"
            )
        if side not in ("left", "right"):
            raise BadTokenIds(f"side must be 'left' or 'right', got {side!r}: name the side to cut away")
        if row.size <= limit:
            return row
        front = len(self._front) if row[: len(self._front)].tolist() == self._front else 0
        back = len(self._back) if row[row.size - len(self._back) :].tolist() == self._back else 0
        text = row[front : row.size - back]
        room = limit - front - back
        text = text[:room] if side == "right" else text[text.size - room :]
        return np.concatenate([row[:front], text, row[row.size - back :]])

    def check(self, ids: Any) -> Ids:
        """Validate one row of token ids that a caller brought, of any length.

        Returns:
            The row as int32 `(tokens,)`.

        Raises:
            BadTokenIds: not a row of integers, or an id the model does not know.
        """
        row = np.asarray(ids)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise BadTokenIds(
                f"token ids must be one row of integers, got {row.dtype} of shape {row.shape}: "
                "pass a flat list of ids"
            )
        outside = (row < 0) | (row >= self.vocab_size)
        if outside.any():
            at = int(outside.argmax())
            raise BadTokenIds(
                f"token ids must be 0 to {self.vocab_size - 1}, got {row[at]} at position {at}: "
                "tokenize with this model's tokenizer"
            )
        return row.astype(np.int32, copy=False)


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special ids put before and after a text."""
    encoding = tokenizer.encode("a")
    marks, ids = encoding.special_tokens_mask, encoding.ids
    if 0 not in marks:
        return ids, []
    first, last = marks.index(0), len(marks) - marks[::-1].index(0)
    return ids[:first], ids[last:]


def _bad_text(texts: Sequence[Any], error: Exception) -> BadText:
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return BadText(f"each text must be a str, got {type(text).__name__} at index {i}: pass text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as fault:
            return BadText(
                f"each text must be valid Unicode, got a lone surrogate at index {i}, "
                f"character {fault.start}: remove or replace it"
            )
    return BadText(f"the texts could not be tokenized, got {error}: check the texts")
