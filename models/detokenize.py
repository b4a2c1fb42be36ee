"""Token ids to text, also one token at a time, without ever showing half a character."""

import codecs
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer

from .bpe import byte_characters


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text as they come. Not thread-safe; one for each sequence."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """Text still held, with U+FFFD for bytes that never became a character. The sequence is over."""
        ...


class ByteTable:
    """The bytes of every token of a byte-level vocabulary; shared by all sequences.

    Attributes:
        special: ids of marks, which are no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        characters = byte_characters()
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        words = tokenizer.get_vocab(with_added_tokens=True)
        self.special = special_ids(tokenizer)
        # Ids without a word (a vocabulary may have gaps) are empty.
        self._bytes = [b""] * max(size, 1 + max(words.values(), default=0))
        for word, i in words.items():
            try:
                self._bytes[i] = bytes(map(characters.__getitem__, word))
            except KeyError:  # an added token outside the byte alphabet stands for itself
                self._bytes[i] = word.encode()

    def join(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        """The bytes of these tokens; ids outside the vocabulary have none."""
        table, skipped = self._bytes, self.special if skip_special else frozenset()
        return b"".join(table[i] for i in ids if 0 <= i < len(table) and i not in skipped)


class ByteStream:
    """A `Detokenizer` for byte-level vocabularies: constant work a token.

    Incomplete characters wait; bytes that no character can begin with become U+FFFD at once, by the
    Unicode standard's rule for maximal subparts (section 3.9), which the full decode follows too.
    """

    def __init__(self, table: ByteTable, *, skip_special: bool = True) -> None:
        self._table = table
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        return self._decoder.decode(self._table.join(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """Text still held."""
        return self._decoder.decode(b"", final=True)


# A character has at most 4 bytes, so a fifth token without a whole one shows that the first is none.
_LONGEST_WAIT = 4


class WindowStream:
    """A `Detokenizer` for any vocabulary: decodes a short window again and gives what is new in it.

    The window holds the tokens last shown and those that wait, since a word's text may depend on the one
    before (a space that is dropped at the start). With byte fallback, bytes that are no UTF-8 can come out
    as another number of U+FFFD than the full decode gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer) if skip_special else frozenset[int]()
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        text = []
        for i in ids:
            if i in self._special:
                continue
            self._waiting.append(i)
            fresh = self._fresh()
            if not fresh.endswith("\ufffd") or len(self._waiting) > _LONGEST_WAIT:
                text.append(self._show(fresh))
        return "".join(text)

    def flush(self) -> str:
        """Text still held."""
        return self._show(self._fresh()) if self._waiting else ""

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        return self._tokenizer.decode(self._shown + self._waiting, skip_special_tokens=False)[len(before) :]

    def _show(self, fresh: str) -> str:
        self._shown, self._waiting = self._waiting, []
        return fresh


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of marks, which are no text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its tokens are bytes in GPT-2's printable alphabet."""
    return type(tokenizer.decoder).__name__ == "ByteLevel"
