"""A ladder: the strictly rising sizes allowed on one axis."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import DoesNotFit, LadderError


@dataclass(frozen=True, slots=True)
class Ladder:
    """The sizes one axis may be padded to.

    A size is served by the smallest rung that is at least as large, so a size equal to a rung
    uses that rung and needs no padding.

    Args:
        rungs: Strictly rising positive integers; the last one is the limit.

    Raises:
        LadderError: if `rungs` is empty, not integral, not positive or not strictly rising.
    """

    rungs: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rungs", _checked(self.rungs))

    @property
    def limit(self) -> int:
        """The largest rung, which is the largest admissible size."""
        return self.rungs[-1]

    def rung_for(self, size: int) -> int:
        """The smallest rung that is at least `size`.

        Args:
            size: An integer from 0 to the limit; 0 takes the smallest rung.

        Raises:
            DoesNotFit: if `size` is above the limit.
            LadderError: if `size` is negative.
        """
        if size < 0:
            raise LadderError(f"A size is at least 0; got {size}.")
        place = bisect_left(self.rungs, size)
        if place == len(self.rungs):
            raise _too_large(size, self.limit)
        return self.rungs[place]

    def rungs_for(self, sizes: ArrayLike) -> NDArray[np.int64]:
        """The rung of each size, as `rung_for` finds it.

        Args:
            sizes: Integers of any shape.

        Returns:
            Rungs, int64, of the same shape.

        Raises:
            DoesNotFit: if a size is above the limit; the message names the first one.
            LadderError: if a size is negative or no integer.
        """
        wanted = np.asarray(sizes)
        if wanted.size == 0:
            return np.zeros(wanted.shape, np.int64)
        if wanted.dtype.kind not in "iu":
            raise LadderError(f"Sizes are integers; got dtype {wanted.dtype}. Convert them first.")
        if wanted.min() < 0:
            raise LadderError(f"A size is at least 0; got {wanted.min()}.")
        if wanted.max() > self.limit:
            raise _too_large(int(wanted[wanted > self.limit].flat[0]), self.limit)
        rungs = np.asarray(self.rungs, np.int64)
        return rungs[np.searchsorted(rungs, wanted, side="left")]

    def worst_padding(self) -> tuple[float, int]:
        """The largest padding any size above the smallest rung can meet, without data.

        Returns:
            `(1 - size / rung, size)` at the worst size; `(0.0, limit)` for a single rung.
        """
        waste = [(1 - (low + 1) / high, low + 1) for low, high in pairwise(self.rungs)]
        return max(waste, key=lambda pair: pair[0], default=(0.0, self.limit))

    def __iter__(self) -> Iterator[int]:
        return iter(self.rungs)

    def __len__(self) -> int:
        return len(self.rungs)

    def __str__(self) -> str:
        return ",".join(map(str, self.rungs))


def _too_large(size: int, limit: int) -> DoesNotFit:
    return DoesNotFit(
        f"A size must be at most the ladder's limit of {limit}; got {size}. Cut the input or raise the limit."
    )


def _checked(rungs: Iterable[int]) -> tuple[int, ...]:
    given = tuple(rungs)
    if not given:
        raise LadderError("A ladder needs at least one rung; got none.")
    for rung in given:
        if isinstance(rung, bool) or not hasattr(rung, "__index__") or rung < 1:
            raise LadderError(f"Rungs are integers of at least 1; got {rung!r}.")
    ints = tuple(map(int, given))
    for low, high in pairwise(ints):
        if high <= low:
            raise LadderError(f"Rungs must rise strictly; got {high} after {low}. Sort them, drop repeats.")
    return ints
