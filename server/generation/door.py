"""What is checked before a request is queued: everything that would fail later is refused here."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import BadRequest, TooLong
from .params import SamplingParams
from .seam import LanguageModel

Prompt = str | Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request may ask for.

    Attributes:
        tokens: of prompt and text, by the model.
        capacity: the same, by the page pool.
        tops: logprobs a place.
        biases: entries of `logit_bias`.
        stop_ids: tokens that end a text, the model's own included.
    """

    tokens: int
    capacity: int
    tops: int
    biases: int
    stop_ids: int


class Door:
    """Checks requests for one model."""

    def __init__(self, model: LanguageModel, bounds: Bounds) -> None:
        self._model, self.bounds = model, bounds

    def ids(self, prompt: Prompt) -> np.ndarray:
        """The prompt's tokens, int32 `(n,)`.

        Raises:
            BadRequest: it is empty, or holds something that is no token.
        """
        if isinstance(prompt, str):
            try:
                prompt = self._model.tokenizer.encode([prompt])[0]
            except ValueError as error:
                raise BadRequest(str(error)) from error
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise BadRequest(
                f"a prompt is a text or a list of at least one token id; got {ids.dtype}{list(ids.shape)}: "
                f"send what the model shall continue"
            )
        if ids.min() < 0 or ids.max() >= self._model.vocab_size:
            raise BadRequest(
                f"token ids are 0 to {self._model.vocab_size - 1}; got {ids.min()} to {ids.max()}: use this "
                f"model's tokenizer"
            )
        return ids.astype(np.int32)

    def most(self, prompt: int, params: SamplingParams) -> int:
        """Tokens that may be generated after so many.

        Raises:
            TooLong: not what is asked for, or none.
        """
        # The last token is sent and never stored.
        room = min(self.bounds.tokens, self.bounds.capacity + 1) - prompt
        asked = params.max_tokens
        if room < 1 or (asked is not None and asked > room):
            why = "model" if self.bounds.tokens <= self.bounds.capacity + 1 else "page pool"
            raise TooLong(
                f"prompt and text are at most {prompt + room} tokens, what the {why} holds; got {prompt} and "
                f"{asked or 'at least 1'}: send a shorter prompt or lower max_tokens"
            )
        most = room if asked is None else asked
        if params.min_tokens > most:
            raise BadRequest(f"min_tokens is at most the {most} that fit; got {params.min_tokens}: lower it")
        return most

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end the text; checks what else depends on the model.

        Raises:
            BadRequest: more of something than the programs have room for, or a token that does not exist.
        """
        vocab = self._model.vocab_size
        ids = (*(() if params.ignore_eos else self._model.eos_ids), *params.stop_ids)
        tokens = [*ids, *params.logit_bias]
        if not all(0 <= token < vocab for token in tokens):
            raise BadRequest(
                f"tokens in stop_ids and logit_bias are 0 to {vocab - 1}; got {sorted(tokens)}: drop others"
            )
        for name, size, bound in (
            ("logit_bias", len(params.logit_bias), self.bounds.biases),
            ("stop_ids", len(set(ids)), self.bounds.stop_ids),
            ("logprobs", params.logprobs or 0, self.bounds.tops),
        ):
            if size > bound:
                raise BadRequest(f"{name} is at most {bound} here; got {size}: ask for fewer")
        return tuple(dict.fromkeys(ids))


def deadline(now_s: float, bound_s: float | None, asked_s: float | None) -> float:
    """When a request must be answered.

    Raises:
        BadRequest: the time asked for is no positive number.
    """
    if asked_s is not None and not asked_s > 0:
        raise BadRequest(f"timeout_s is above 0; got {asked_s}: leave it out for no bound")
    return now_s + min(math.inf if one is None else one for one in (bound_s, asked_s))


def fresh_seed(params: SamplingParams) -> int:
    """The request's seed, or a new one: two without a seed never draw alike."""
    return secrets.randbits(64) if params.seed is None else params.seed
