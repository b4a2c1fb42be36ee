"""Text in front of a model of token ids: tokenizing, the length rule, declared cutting, embeddings out."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from .datatypes import all_finite
from .errors import BadRequest, BadTensor, ModelError, TooLong
from .seam import ModelHandle
from .tokenizing import Tokenizing

Side = Literal["left", "right"]


class Tokenizer(Protocol):
    """What the text front needs of a tokenizer.

    Attributes:
        max_tokens: the model's limit, counting special tokens.
        vocab_size: ids are 0 to `vocab_size - 1`.
    """

    @property
    def max_tokens(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32[tokens], special tokens added, never cut."""
        ...

    def truncate(self, ids: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
        """Cuts `ids` to `max_tokens` on that side, keeping the special tokens at both ends."""
        ...


class Cut(NamedTuple):
    """One input that was cut: its place in the request, and its tokens before and after."""

    at: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token ids that keep the length rule.

    Attributes:
        ids: int32[tokens], one an input.
        cuts: the inputs that were cut, by rising index.
    """

    ids: list[np.ndarray]
    cuts: list[Cut]

    @property
    def token_counts(self) -> list[int]:
        """Real tokens of each input, special ones included, after cutting."""
        return [len(ids) for ids in self.ids]


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings of the inputs, in their order.

    Attributes:
        vectors: float32[inputs, width].
        token_counts: real tokens of each input, as the model saw it.
        truncated: `(index, from, to)` of each input that was cut.
    """

    vectors: np.ndarray
    token_counts: list[int]
    truncated: list[Cut]


class Embedder:
    """A text front over one model.

    Args:
        model: takes the ids and gives the embedding.
        tokenizer: of that model.
        input_name: the model's input of token ids, an integer vector per item.
        output_name: the model's output that is the embedding, a float vector per item.
        inline_chars: texts of together fewer characters are tokenized on the event loop.
        pending_chars: most characters that wait for or are in tokenizing off the event loop.
        text_chars: most characters of one text.
    """

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: Tokenizer,
        input_name: str = "ids",
        output_name: str = "embedding",
        *,
        inline_chars: int = 20_000,
        pending_chars: int = 10_000_000,
        text_chars: int = 1_000_000,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.input_name = input_name
        self.output_name = output_name
        self._tokenizing = Tokenizing(inline_chars, pending_chars, text_chars)
        self._ids_dtype = next(spec.dtype for spec in model.inputs if spec.name == input_name)
        axis = next(spec.shape for spec in model.inputs if spec.name == input_name)[0]
        model_limit = axis if isinstance(axis, int) else model.limits.get(axis, tokenizer.max_tokens)
        self.max_tokens = min(tokenizer.max_tokens, model_limit)
        shape = next(spec.shape for spec in model.outputs if spec.name == output_name)
        self.width = int(shape[-1])

    async def tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, special tokens included; long work leaves the event loop.

        Raises:
            BadRequest: a text that the tokenizer does not take.
            TooLong: a text has more characters than one may have.
            Overloaded: more characters wait for the tokenizer than may.
        """
        return list(await self._tokenizing(self.tokenizer.encode, texts))

    async def prepare(
        self,
        inputs: Sequence[str] | Sequence[np.ndarray],
        *,
        truncate: bool = False,
        truncate_side: Side = "right",
    ) -> Prepared:
        """Brings texts or token ids to valid ids within the limit.

        Token ids are taken as they are: the caller has added the special tokens.

        Args:
            inputs: texts, or integer vectors of ids.
            truncate: cut what is longer than `max_tokens` instead of refusing it.
            truncate_side: the side to cut off, `"right"` or `"left"`.

        Raises:
            BadTensor: an id vector is empty, or an id is outside the vocabulary.
            TooLong: an input has more than `max_tokens` tokens and `truncate` is false.
        """
        if inputs and isinstance(inputs[0], str):
            vectors = await self.tokenize([text for text in inputs if isinstance(text, str)])
        else:
            vectors = [self._checked(i, ids) for i, ids in enumerate(inputs) if isinstance(ids, np.ndarray)]
        ids: list[np.ndarray] = []
        cuts: list[Cut] = []
        for index, vector in enumerate(vectors):
            if len(vector) <= self.max_tokens:
                ids.append(vector)
                continue
            if not truncate:
                raise TooLong(
                    f"An input of {self.model.name!r} has at most {self.max_tokens} tokens, special ones"
                    f" included, got {len(vector)} at index {index}; shorten it, or set truncate=true to cut."
                )
            kept = self.tokenizer.truncate(vector, self.max_tokens, truncate_side)
            cuts.append(Cut(index, len(vector), len(kept)))
            ids.append(kept)
        return Prepared([vector.astype(self._ids_dtype, copy=False) for vector in ids], cuts)

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[np.ndarray],
        *,
        truncate: bool = False,
        truncate_side: Side = "right",
        dimensions: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> EmbedResult:
        """Embeds texts or token ids.

        Args:
            inputs: texts, or integer vectors of ids; may be empty.
            truncate: cut what is too long instead of refusing it.
            truncate_side: the side to cut off.
            dimensions: keep the first so many values and normalise again; None keeps all as they are.
            priority: see `ModelHandle.submit`.
            timeout_s: see `ModelHandle.submit`.

        Raises:
            BadRequest: `dimensions` is not between 1 and the model's width.
            ServerError: what `prepare` and `ModelHandle.submit` raise.
        """
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise BadRequest(
                f"dimensions must be 1 to {self.width} for model {self.model.name!r}, got {dimensions}; "
                "choose a size in that range or leave it out."
            )
        prepared = await self.prepare(inputs, truncate=truncate, truncate_side=truncate_side)
        rows = [{self.input_name: ids} for ids in prepared.ids]
        answers = await self.model.submit(rows, priority=priority, timeout_s=timeout_s) if rows else []
        if len(answers) != len(rows):
            raise ModelError(
                f"A model answers each row, expected {len(rows)} rows, got {len(answers)}; report it."
            )
        vectors = self._vectors([answer[self.output_name] for answer in answers])
        if not all_finite(vectors):
            raise ModelError(
                f"An embedding must be finite, got NaN or infinity from {self.model.name!r}; report it."
            )
        return EmbedResult(cut_dimensions(vectors, dimensions), prepared.token_counts, prepared.cuts)

    def _vectors(self, answers: Sequence[np.ndarray]) -> np.ndarray:
        if len(answers) == 1:  # its own already, and the usual case
            return answers[0].astype(np.float32, copy=False).reshape(1, self.width)
        vectors = np.empty((len(answers), self.width), np.float32)
        for target, answer in zip(vectors, answers, strict=True):
            target[:] = answer
        return vectors

    def _checked(self, index: int, ids: np.ndarray) -> np.ndarray:
        if ids.size == 0:
            raise BadTensor(f"A token list needs at least one id, got none at index {index}; leave it out.")
        low, high, vocab = int(ids.min()), int(ids.max()), self.tokenizer.vocab_size
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise BadTensor(
                f"Token ids of model {self.model.name!r} are 0 to {vocab - 1}, got {wrong} at index {index}; "
                "tokenize with the model's own tokenizer."
            )
        return ids


def tokenized(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    input_name: str = "ids",
    truncate_side: Side = "right",
    chunk: int = 256,
) -> Iterator[dict[str, np.ndarray]]:
    """Items of texts for `Server.map`, tokenized some at a time, while what came before runs.

    Args:
        texts: any number.
        tokenizer: of the model; texts with more than its `max_tokens` are cut to them.
        input_name: the model's input of token ids.
        truncate_side: the side to cut off.
        chunk: how many texts are tokenized together.

    Yields:
        int32[tokens] by the input's name, one a text, in order.

    Raises:
        ValueError: a text that the tokenizer does not take.
    """
    source = iter(texts)
    while some := list(itertools.islice(source, chunk)):
        for ids in tokenizer.encode(some):
            long = len(ids) > tokenizer.max_tokens
            yield {input_name: tokenizer.truncate(ids, tokenizer.max_tokens, truncate_side) if long else ids}


def cut_dimensions(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Keeps the first `dimensions` columns of float32[n, width] and scales rows to unit length.

    A zero row stays zero. This is the cutting of Matryoshka embeddings (Kusupati et al., 2022).
    """
    if dimensions is None:
        return vectors
    kept = np.array(vectors[:, :dimensions], order="C")  # one of its own: a row may be the model's
    norms = np.linalg.norm(kept, axis=1, keepdims=True)
    np.divide(kept, norms, out=kept, where=norms > 0)
    return kept
