"""Tokenizing beside an event loop: short texts in place, long ones in worker threads, within bounds."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from .errors import BadRequest, Overloaded

_CHARS_PER_S = 2e6
Encode = Callable[[Sequence[str]], Sequence[np.ndarray]]


class Tokenizing:
    """Runs tokenizers for the calls of one event loop.

    Args:
        inline_chars: texts of together fewer characters are tokenized on the event loop.
        pending_chars: most characters that wait for or are in tokenizing off the event loop.
    """

    def __init__(self, inline_chars: int = 20_000, pending_chars: int = 10_000_000) -> None:
        self._inline_chars = inline_chars
        self._most_pending, self._pending = pending_chars, 0

    async def __call__(self, encode: Encode, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """Token ids of each text.

        Args:
            encode: the tokenizer's.
            texts: any number.

        Raises:
            BadRequest: a text that the tokenizer does not take.
            Overloaded: more characters wait for the tokenizer than may.
        """
        chars = sum(map(len, texts))
        try:
            if chars < self._inline_chars:
                return encode(texts)
            self._refuse_if_full(chars)
            self._pending += chars
            try:
                return await asyncio.to_thread(encode, texts)
            finally:
                self._pending -= chars
        except ValueError as error:
            raise BadRequest(f"A text must be one that the tokenizer takes, got: {error}") from error

    def _refuse_if_full(self, chars: int) -> None:
        if self._pending and self._pending + chars > self._most_pending:
            retry_s = self._pending / _CHARS_PER_S
            raise Overloaded(
                f"at most {self._most_pending} characters wait for the tokenizer; {self._pending} do and the "
                f"request has {chars}: retry after {retry_s:.3g} s",
                retry_s,
                "tokenizer",
            )
