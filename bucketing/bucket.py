"""A bucket: one size for each axis, the shape of one compiled program."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import GridError

BATCH = "batch"


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One size for each axis; the first axis is always `batch`.

    A servable whose items never vary has the axes `("batch",)` alone. Hash, rows and element count
    are computed once, since buckets are dictionary keys on the path of every batch.

    Args:
        axes: Distinct names, `"batch"` first.
        sizes: As many integers of at least 1.

    Raises:
        GridError: if the axes or sizes are not as above.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: int = field(init=False, repr=False)
    item_sizes: tuple[int, ...] = field(init=False, repr=False)
    elements: int = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        axes, sizes = checked_axes(self.axes), tuple(self.sizes)
        if len(sizes) != len(axes):
            raise GridError(f"A bucket needs one size for each of the axes {axes}; got {sizes}.")
        for size in sizes:
            if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
                raise GridError(f"A bucket's sizes are integers of at least 1; got {sizes}.")
        sizes = tuple(map(int, sizes))
        for name, value in (
            ("axes", axes),
            ("sizes", sizes),
            ("rows", sizes[0]),
            ("item_sizes", sizes[1:]),
            ("elements", math.prod(sizes)),
            ("_hash", hash((axes, sizes))),
        ):
            object.__setattr__(self, name, value)

    @staticmethod
    def parse(text: str, axes: tuple[str, ...]) -> "Bucket":
        """The bucket written as `8x64`, one size for each axis in order.

        Raises:
            GridError: if the text is not that.
        """
        try:
            sizes = tuple(int(word) for word in text.strip().split("x"))
        except ValueError:
            raise GridError(
                f"A bucket is written as sizes joined by x, such as 8x64; got {text!r}."
            ) from None
        return Bucket(axes, sizes)

    def holds(self, rows: int, item_sizes: tuple[int, ...]) -> bool:
        """Whether `rows` items, none larger than `item_sizes` on any axis, fit."""
        if rows > self.rows:
            return False
        return all(mine >= size for mine, size in zip(self.item_sizes, item_sizes, strict=True))

    def contains(self, other: "Bucket") -> bool:
        """Whether this bucket is at least as large as `other` on every axis."""
        return self.axes == other.axes and self.holds(other.rows, other.item_sizes)

    def __getitem__(self, axis: str) -> int:
        try:
            return self.sizes[self.axes.index(axis)]
        except ValueError:
            raise GridError(f"A bucket's axis is one of {self.axes}; got {axis!r}.") from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Bucket):
            return NotImplemented
        return self.sizes == other.sizes and self.axes == other.axes

    def __lt__(self, other: "Bucket") -> bool:
        return self.sizes < other.sizes

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., "Bucket"], tuple[tuple[str, ...], tuple[int, ...]]]:
        # String hashes differ from process to process, so the cached one must not travel.
        return Bucket, (self.axes, self.sizes)

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))


def checked_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes as a tuple of distinct names that starts with `batch`, or a GridError."""
    names = tuple(axes)
    if not names or names[0] != BATCH or len(set(names)) != len(names):
        raise GridError(f"Axes are distinct names of which the first is {BATCH!r}; got {names}.")
    return names
