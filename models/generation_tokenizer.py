"""The tokenizer of a generative model: text to ids and back, whole or as a stream."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from .detokenize import ByteStream, ByteTable, Detokenizer, WindowStream, is_byte_level, special_ids
from .tokenizer import Ids, TextTokenizer


class GenerationTokenizer(TextTokenizer):
    """A `TextTokenizer` that also decodes.

    Attributes:
        special_ids: ids of marks, which are no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, vocab_size: int, pad_id: int) -> None:
        super().__init__(tokenizer, max_tokens=max_tokens, vocab_size=vocab_size, pad_id=pad_id)
        self._table = ByteTable(tokenizer) if is_byte_level(tokenizer) else None
        self.special_ids = special_ids(tokenizer)

    def encode_rendered(self, texts: Sequence[str]) -> list[Ids]:
        """Tokenize texts that already hold their marks, as a chat template writes them: none is added.

        Raises:
            BadText: see `encode`.
        """
        front, back = len(self._front), len(self._back)
        return [row[front : row.size - back] for row in self.encode(texts)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence, U+FFFD where bytes are no UTF-8; equal to a stream's joined parts."""
        stream = self.stream(skip_special=skip_special)
        return stream.push(map(int, ids)) + stream.flush()

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text; of some a part of a character."""
        if self._table is not None:
            return self._table.join([token], skip_special=False)
        return self.decode([token], skip_special=False).encode()

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for one sequence."""
        if self._table is not None:
            return ByteStream(self._table, skip_special=skip_special)
        return WindowStream(self._tokenizer, skip_special=skip_special)
