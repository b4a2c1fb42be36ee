"""Whether two answers to one item are the same, and where they differ most."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

_EXACT = 1e-5
# Sums of another order make other values round up, and what follows rounds that again. MiniLM's vectors of
# norm 1 were seen to move by 6e-4 in bfloat16 and by 4e-3 in int8.
_BY_WEIGHTS = {"float16": 2e-3, "bfloat16": 2e-3, "int8": 1e-2, "uint8": 1e-2}


@dataclass(frozen=True, slots=True)
class Moved:
    """Where two answers differ most.

    Attributes:
        leaf: index of the output leaf.
        place: place in that leaf's array for one item.
        difference: absolute difference; infinite where one side is not finite or dtypes are not numbers.
        allowed: what would have passed.
        outside: whether the difference is beyond what is allowed.
    """

    leaf: int
    place: tuple[int, ...]
    difference: float
    allowed: float
    outside: bool


def compare(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float | None = None
) -> Moved | None:
    """The largest difference between two answers of one item; None if there is none.

    Args:
        got: output leaves.
        want: the same, of the run that counts as right.
        tolerance: relative to max(1, largest absolute output), at least 8 units in the last place of the
            output's own dtype; None asks for equality of every value.
    """
    worst: Moved | None = None
    for index, (mine, other) in enumerate(zip(got, want, strict=True)):
        if mine.shape != other.shape:
            return Moved(index, (), float("inf"), 0.0, True)
        if (mine == other).all():
            continue
        a, b = _wide(mine), _wide(other)
        with np.errstate(invalid="ignore"):
            difference = np.where(a == b, 0.0, np.abs(a - b))
        difference = np.where(np.isnan(difference), np.inf, difference)
        place = np.unravel_index(int(difference.argmax()), difference.shape)
        largest = float(difference[place])
        allowed = 0.0 if tolerance is None else _allowed(tolerance, b, mine.dtype)
        moved = Moved(index, tuple(map(int, place)), largest, allowed, largest > allowed)
        if worst is None or (moved.outside, moved.difference) > (worst.outside, worst.difference):
            worst = moved
    return worst


def usual_tolerance(weights: Iterable[Any]) -> float:
    """How far two buckets may lie apart, where nothing is asked for: more for a model of low precision.

    Args:
        weights: each has a shape and a dtype; the type of most numbers counts.
    """
    numbers = Counter[str]()
    for one in weights:
        numbers[str(one.dtype)] += math.prod(one.shape)
    most = numbers.most_common(1)
    return _BY_WEIGHTS.get(most[0][0], _EXACT) if most else _EXACT


def _allowed(tolerance: float, want: np.ndarray, dtype: np.dtype[Any]) -> float:
    if jnp.issubdtype(dtype, jnp.inexact):
        finfo: Any = ml_dtypes.finfo
        tolerance = max(tolerance, 8 * float(finfo(dtype).eps))
    finite = np.abs(want[np.isfinite(want)])
    return tolerance * max(1.0, float(finite.max(initial=0.0)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def is_nan(array: np.ndarray) -> np.ndarray:
    """Where an array of any dtype is NaN."""
    nan: np.ndarray = array != array
    return nan


def is_finite(array: np.ndarray) -> np.ndarray:
    """Where an array of any dtype is finite."""
    if array.dtype.kind in "iub":
        return np.ones(array.shape, np.bool_)
    finite: np.ndarray = np.isfinite(array.astype(np.complex128))
    return finite
