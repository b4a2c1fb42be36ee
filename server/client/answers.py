"""What a client gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Inference:
    """Outputs of one inference; `answer["y"]` is one of them.

    Attributes:
        outputs: arrays `(rows, ...)` by name, read-only views of the answer's bytes; lists of texts where the
            model gives texts.
        model: who answered.
        version: of the model.
        request_id: under which the server logged it.
        truncated: index, `from` and `to` of each input that was cut, where that was asked for.
    """

    outputs: Mapping[str, Any]
    model: str
    version: str
    request_id: str | None = None
    truncated: tuple[Mapping[str, int], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.outputs[name]

    def __repr__(self) -> str:
        shown = {name: _shape(value) for name, value in self.outputs.items()}
        return f"Inference({shown}, model={self.model!r}, version={self.version!r})"


def _shape(value: Any) -> str:
    """An array as it is declared; numbers by the hundred tell nobody anything."""
    dtype, shape = getattr(value, "dtype", "texts"), getattr(value, "shape", None)
    return f"{dtype}[{', '.join(map(str, shape if shape is not None else (len(value),)))}]"


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of texts.

    Attributes:
        vectors: float32 `(texts, size)`.
        tokens: real tokens that the model saw.
        request_id: under which the server logged it.
        truncated: index, `from` and `to` of each text that was cut, where that was asked for.
    """

    vectors: NDArray[np.float32]
    tokens: int
    request_id: str | None = None
    truncated: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one completion; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> "Usage":
        """From OpenAI's shape."""
        known = body or {}
        details = known.get("prompt_tokens_details") or {}
        return cls(
            known.get("prompt_tokens", 0), known.get("completion_tokens", 0), details.get("cached_tokens", 0)
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation.

    Attributes:
        text: the whole of it.
        finish_reason: `stop` or `length`.
        logprobs: as the server sent them, where they were asked for.
    """

    text: str
    finish_reason: str
    logprobs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a language model wrote; `text` and `finish_reason` are those of the first choice."""

    choices: tuple[Choice, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """Of the first choice."""
        return self.choices[0].finish_reason
