"""What a caller gets: deltas of a stream, and their sum."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one place, of the model's own distribution.

    Attributes:
        token: the chosen token.
        logprob: its own.
        top: the most likely tokens and theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: in the prompt.
        completion_tokens: generated, the one that ended the text included.
        cached_tokens: of the prompt, found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one.

    Attributes:
        ids: tokens.
        text: text that can be sent; tokens of it may have come earlier, where a stop string was possible.
        logprobs: one a token, if asked for.
        finish_reason: `stop` or `length` in the last delta.
        stop_reason: the stop string or token that ended the text, if one did.
        usage: in the last delta.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """The whole of a stream as one delta."""
    last = deltas[-1]
    return Delta(
        tuple(token for delta in deltas for token in delta.ids),
        "".join([delta.text for delta in deltas]),
        tuple(one for delta in deltas for one in delta.logprobs),
        last.finish_reason,
        last.stop_reason,
        last.usage,
    )
