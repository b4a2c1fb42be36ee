"""What a caller asks of a continuation. Data only: no value of it decides which program runs."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadRequest

_SEEDS = 1 << 64
# At any temperature far within float32, whose infinities the sampler has a use of its own for.
_MOST_BIAS = 1e6
_KINDS = {
    **dict.fromkeys(("max_tokens", "seed", "logprobs"), "an integer or None"),
    **dict.fromkeys(("min_tokens", "top_k"), "an integer"),
    "logit_bias": "numbers by integer token",
    "stop_ids": "integers",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    Order of work: penalties, `logit_bias`, then the largest logit at temperature 0; above 0 division by the
    temperature, `top_k`, `top_p` of what is left, `min_p`, and a draw.

    Attributes:
        max_tokens: most tokens to generate; None for as many as the model and the pool hold.
        min_tokens: tokens before which neither `stop_ids` nor the model's own end are chosen.
        temperature: 0 for the most likely token.
        top_k: only so many most likely tokens (and those that tie with the last); 0 for all.
        top_p: only the most likely tokens that together have this probability (Holtzman et al. 2019).
        min_p: only tokens at least this fraction as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or text
            (Keskar et al. 2019); 1 for none.
        presence_penalty: subtracted from logits of tokens in the text.
        frequency_penalty: subtracted for each time that a token is in the text.
        logit_bias: added to logits, by token.
        seed: the same seed gives the same text whatever else is running; None draws a fresh one.
        stop: strings that end the text; they are not part of it.
        stop_ids: tokens that end the text besides the model's own.
        ignore_eos: the model's own end does not end the text.
        logprobs: how many most likely tokens to report at each place; None reports nothing, 0 only the
            chosen token. They are of the model's own distribution, before anything above.
        skip_special: leave the model's marks out of the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special: bool = True

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_lengths()
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _between("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _between("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        stop: object = self.stop  # a plain string would be taken for its characters
        if not isinstance(stop, tuple) or not all(isinstance(one, str) and one for one in stop):
            raise BadRequest(
                f"stop is one or more strings of at least one character; got {self.stop!r}: leave it out"
            )
        if not all(abs(value) <= _MOST_BIAS for value in self.logit_bias.values()):  # also refuses NaN
            raise BadRequest(
                f"logit_bias holds finite numbers up to {_MOST_BIAS:g}; got {dict(self.logit_bias)}: use "
                "-100 to ban"
            )
        if self.seed is not None and not -_SEEDS // 2 <= self.seed < _SEEDS:
            raise BadRequest(f"seed is an integer of 64 bits; got {self.seed}: take a smaller one")

    def _check_kinds(self) -> None:
        """Numbers become Python's own: those of NumPy wrap around, or warn, where they are used."""
        given: Mapping[str, Callable[[Any], Any]] = {
            **dict.fromkeys(("max_tokens", "seed", "logprobs"), _integer_or_none),
            **dict.fromkeys(("min_tokens", "top_k"), operator.index),
            **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _real),
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), _real),
            "logit_bias": lambda found: {operator.index(key): _real(value) for key, value in found.items()},
            "stop_ids": lambda found: tuple(map(operator.index, found)),
        }
        for name, kind in given.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, AttributeError):
                raise BadRequest(
                    f"{name} is {_KINDS.get(name, 'a number')}; got {value!r}: correct it"
                ) from None

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest(f"max_tokens is at least 1; got {self.max_tokens}: leave it out for no bound")
        for name in ("min_tokens", "top_k", "logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadRequest(f"{name} is at least 0; got {value}: leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is at most max_tokens, {self.max_tokens}; got {self.min_tokens}: lower it"
            )

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer_or_none(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def _real(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(value)
    return float(value)


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not (low < value <= high if open_low else low <= value <= high):  # also refuses NaN
        interval = f"{'above' if open_low else 'from'} {low:g} to {high:g}"
        raise BadRequest(f"{name} is {interval}; got {value}: change it or leave it out")
