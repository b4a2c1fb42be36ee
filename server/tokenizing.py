"""Tokenizing beside an event loop: short texts in place, long ones in worker threads, within bounds.

A tokenizer takes some 200 bytes a character while it works, and allocators keep much of that for each thread:
so few threads do it, with a slice of a request at a time.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .errors import BadRequest, Overloaded, TooLong

_CHARS_PER_S = 2e6
_WORKERS = 2
_SLICE_CHARS = 250_000
Encode = Callable[[Sequence[str]], Sequence[np.ndarray]]


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, "servax-tokenize")


class Tokenizing:
    """Runs tokenizers for the calls of event loops.

    Args:
        inline_chars: texts of together fewer characters are tokenized on the event loop.
        pending_chars: most characters that wait for or are in tokenizing off the event loop.
        text_chars: most characters of one text.
    """

    def __init__(
        self, inline_chars: int = 20_000, pending_chars: int = 10_000_000, text_chars: int = 1_000_000
    ) -> None:
        self._inline_chars, self._text_chars = inline_chars, text_chars
        self._most_pending, self._pending = pending_chars, 0
        self._lock = threading.Lock()

    async def __call__(self, encode: Encode, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """Token ids of each text.

        Args:
            encode: the tokenizer's.
            texts: any number.

        Raises:
            BadRequest: a text that the tokenizer does not take.
            TooLong: a text has more characters than one may have.
            Overloaded: more characters wait for the tokenizer than may.
        """
        sizes = list(map(len, texts))
        chars, longest = sum(sizes), max(sizes, default=0)
        if longest > self._text_chars:
            raise TooLong(
                f"A text has at most {self._text_chars} characters, got {longest} at index "
                f"{sizes.index(longest)}; cut it before you send it."
            )
        try:
            if chars < self._inline_chars:
                return encode(texts)
            return await self._elsewhere(encode, texts, chars)
        except ValueError as error:
            raise BadRequest(f"A text must be one that the tokenizer takes, got: {error}") from error

    async def _elsewhere(self, encode: Encode, texts: Sequence[str], chars: int) -> Sequence[np.ndarray]:
        self._admit(chars)
        left = threading.Event()

        def work() -> list[np.ndarray]:
            ids: list[np.ndarray] = []
            for some in _slices(texts):
                if left.is_set():
                    break
                ids += encode(some)
            return ids

        def over(_: "Future[list[np.ndarray]]") -> None:
            with self._lock:
                self._pending -= chars

        try:
            done = _workers().submit(contextvars.copy_context().run, work)
        except BaseException:
            over(Future())
            raise
        # Not before the thread is done with them, or callers that leave would let in any number of others.
        done.add_done_callback(over)
        try:
            return await asyncio.wrap_future(done)
        finally:
            left.set()

    def _admit(self, chars: int) -> None:
        with self._lock:
            if self._pending and self._pending + chars > self._most_pending:
                retry_s = self._pending / _CHARS_PER_S
                raise Overloaded(
                    f"at most {self._most_pending} characters wait for the tokenizer; {self._pending} do and "
                    f"the request has {chars}: retry after {retry_s:.3g} s",
                    retry_s,
                    "tokenizer",
                )
            self._pending += chars


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts in order, of together so many characters at most or one by itself."""
    begin = chars = 0
    for index, text in enumerate(texts):
        if chars and chars + len(text) > _SLICE_CHARS:
            yield texts[begin:index]
            begin, chars = index, 0
        chars += len(text)
    yield texts[begin:]
