"""Schemes: rules that make a ladder for any limit.

Every ladder ends exactly at the limit and has no rung above it, whatever the rule would have
reached by itself (limit 317 under doubling gives 1, 2, ..., 256, 317). Where a scheme aligns, every
rung except the limit is a multiple of the alignment.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, runtime_checkable

from .errors import SchemeError
from .ladder import Ladder


@runtime_checkable
class Scheme(Protocol):
    """What makes ladders: a name that `parse_scheme` reads back, and one method."""

    @property
    def name(self) -> str:
        """The scheme and its parameters, such as `linear:32`."""

    def ladder(self, limit: int) -> Ladder:
        """The ladder that ends exactly at `limit`."""


@dataclass(frozen=True, slots=True)
class _RuleScheme:
    """A scheme whose rungs follow from its parameters; equal names are equal schemes."""

    name: str
    rungs_below: Callable[[int], Iterable[int]] = field(compare=False, repr=False)

    def ladder(self, limit: int) -> Ladder:
        """The rule's rungs below `limit`, then `limit`.

        Raises:
            SchemeError: if `limit` is no integer of at least 1.
        """
        limit = _whole("limit", limit)
        return Ladder((*(rung for rung in self.rungs_below(limit) if rung < limit), limit))

    def __reduce__(self) -> tuple[Callable[[str], "Scheme"], tuple[str]]:
        return parse_scheme, (self.name,)


def exact() -> Scheme:
    """Every size is its own rung: no padding, one program a size."""
    return _RuleScheme("exact", lambda limit: range(1, limit))


def single() -> Scheme:
    """One rung, the limit: one program, everything padded to the maximum."""
    return _RuleScheme("single", lambda limit: ())


def linear(step: int) -> Scheme:
    """Multiples of `step`, then the limit."""
    step = _whole("step", step)
    return _RuleScheme(f"linear:{step}", lambda limit: range(step, limit, step))


def powers_of_two(minimum: int = 1) -> Scheme:
    """Powers of two from the first one that is at least `minimum`, then the limit."""
    first = 1 << (_whole("minimum", minimum) - 1).bit_length()
    name = "powers_of_two" if minimum == 1 else f"powers_of_two:{minimum}"
    return _RuleScheme(name, lambda limit: _grow(first, lambda rung: rung * 2, limit))


def geometric(growth: float, align: int = 1, minimum: int = 1) -> Scheme:
    """Each rung `growth` times the one before, rounded up to a multiple of `align`.

    Args:
        growth: Above 1.
        align: Every rung but the limit is a multiple of it.
        minimum: The first rung is the first multiple of `align` that is at least this.
    """
    if not (math.isfinite(growth) and growth > 1):
        raise SchemeError(f"growth must be a finite number above 1; got {growth!r}. Try 1.5 or 2.")
    align, minimum = _whole("align", align), _whole("minimum", minimum)

    def following(rung: int) -> int:
        # The guard keeps 10 * 1.1 at 11 where floating point says 11.000000000000002.
        wanted = max(rung + 1, math.ceil(rung * growth * (1 - 1e-12)))
        return _round_up(wanted, align)

    first = _round_up(minimum, align)
    return _RuleScheme(
        f"geometric:{growth:g},{align},{minimum}", lambda limit: _grow(first, following, limit)
    )


def bounded_waste(percent: float, minimum: int = 1) -> Scheme:
    """The fewest rungs such that no size above the smallest rung pads more than `percent`.

    Built downwards from the limit: below rung r comes the lowest rung whose next larger size still
    fills `1 - percent / 100` of r, so a rung is kept only if skipping it would waste more.

    Args:
        percent: Largest padding, 1 - size / rung, in percent; above 0 and below 100.
        minimum: No rung is below it, unless the limit is.
    """
    if not 0 < percent < 100:
        raise SchemeError(f"percent must be above 0 and below 100; got {percent!r}. Try 25.")
    minimum = _whole("minimum", minimum)
    filled = 1 - Fraction(percent).limit_denominator(10**6) / 100

    def rungs_below(limit: int) -> Iterable[int]:
        falling: list[int] = []
        rung = math.ceil(limit * filled) - 1
        while rung >= minimum:
            falling.append(rung)
            rung = math.ceil(rung * filled) - 1
        return reversed(falling)

    return _RuleScheme(f"bounded_waste:{percent:g},{minimum}", rungs_below)


def explicit(rungs: Iterable[int]) -> Scheme:
    """The given rungs below the limit, then the limit."""
    given = Ladder(tuple(rungs)).rungs
    return _RuleScheme("explicit:" + ",".join(map(str, given)), lambda limit: given)


def parse_scheme(text: str) -> Scheme:
    """The scheme written as `name` or `name:parameters`, parameters separated by commas.

    `exact`, `single`, `linear:32`, `powers_of_two`, `powers_of_two:8`, `geometric:1.5,16,8`
    (growth, align, minimum), `bounded_waste:25` and `explicit:64,128,256`; a parameter may be
    named, as in `geometric:1.5,minimum=8`. `parse_scheme(scheme.name) == scheme`.

    Raises:
        SchemeError: if the name is unknown or its parameters are; the message lists what exists.
    """
    name, _, rest = text.strip().partition(":")
    name = name.strip().replace("-", "_")
    if name == "fitted":
        raise SchemeError(f"fitted needs observed sizes; got {text!r}. Use fitted(histogram, programs).")
    if name not in _MAKERS:
        raise SchemeError(f"A scheme is one of {', '.join(_MAKERS)}; got {text!r}.")
    maker, kinds = _MAKERS[name]
    words = [word.strip() for word in rest.split(",") if word.strip()]
    if name == "explicit":
        return explicit([int(_number(text, word, int)) for word in words])
    values: dict[str, float] = {}
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals:
            key, value = (list(kinds)[place], word) if place < len(kinds) else (word, word)
        if key not in kinds or key in values:
            raise SchemeError(f"{name} takes {', '.join(kinds) or 'no parameters'}; got {text!r}.")
        values[key] = _number(text, value, kinds[key])
    try:
        return maker(**values)
    except TypeError:
        raise SchemeError(f"{name} needs {', '.join(kinds)}; got {text!r}.") from None


SchemeLike = Scheme | str | Sequence[int]
"""A scheme, its name as `parse_scheme` reads it, or a list of sizes."""


def as_scheme(chosen: SchemeLike) -> Scheme:
    """The scheme that is meant by an object, a name or a list of sizes.

    Raises:
        SchemeError: if it is none of the three.
        LadderError: if the list is not strictly rising from 1 up.
    """
    if isinstance(chosen, Scheme):
        return chosen
    if isinstance(chosen, str):
        return parse_scheme(chosen)
    try:
        return explicit(chosen)
    except TypeError:
        raise SchemeError(
            f"A scheme is an object with ladder(), a name or a list of sizes; got {chosen!r}."
        ) from None


_MAKERS: dict[str, tuple[Callable[..., Scheme], dict[str, type[int] | type[float]]]] = {
    "exact": (exact, {}),
    "single": (single, {}),
    "linear": (linear, {"step": int}),
    "powers_of_two": (powers_of_two, {"minimum": int}),
    "geometric": (geometric, {"growth": float, "align": int, "minimum": int}),
    "bounded_waste": (bounded_waste, {"percent": float, "minimum": int}),
    "explicit": (explicit, {"rungs": int}),
}


def _number(text: str, word: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(word)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise SchemeError(f"A scheme's parameter must be {what}; got {word!r} in {text!r}.") from None


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise SchemeError(f"{name} must be an integer of at least 1; got {value!r}.")
    return int(value)


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _grow(first: int, following: Callable[[int], int], limit: int) -> Iterable[int]:
    rung = first
    while rung < limit:
        yield rung
        rung = following(rung)
