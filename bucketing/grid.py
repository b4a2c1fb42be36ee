"""A grid: the set of buckets of one servable, and the proof that it covers what is admissible.

A grid need not be a rectangle: a long bucket usually has a shorter batch ladder than a short one.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .bucket import BATCH, Bucket, checked_axes
from .errors import CoverageError, DoesNotFit, GridError
from .ladder import Ladder


class Grid:
    """An immutable, sorted set of buckets over the same axes.

    Args:
        axes: Distinct names, `"batch"` first.
        buckets: At least one bucket over these axes; repeats are dropped.

    Raises:
        GridError: if there is no bucket, or one over other axes.
    """

    def __init__(self, axes: tuple[str, ...], buckets: Iterable[Bucket]) -> None:
        self.axes = checked_axes(axes)
        unique = set(buckets)
        if not unique:
            raise GridError("A grid needs at least one bucket; got none.")
        for bucket in unique:
            if bucket.axes != self.axes:
                raise GridError(f"A grid's buckets share its axes {self.axes}; got {bucket.axes}.")
        self.buckets: tuple[Bucket, ...] = tuple(sorted(unique))
        self.item_axes: tuple[str, ...] = self.axes[1:]
        self._rungs: tuple[tuple[int, ...], ...] = tuple(
            tuple(sorted(set(sizes))) for sizes in zip(*(b.sizes for b in unique), strict=True)
        )
        self._by_elements = sorted(self.buckets, key=lambda bucket: (bucket.elements, bucket.sizes))
        self._found: dict[tuple[int, ...], tuple[Bucket, ...]] = {}
        self._hash = hash((self.axes, self.buckets))

    @classmethod
    def product(cls, ladders: Mapping[str, Ladder], *, max_elements: int | None = None) -> "Grid":
        """Every combination of the ladders' rungs, capped in elements.

        Args:
            ladders: One ladder for each axis, `"batch"` among them; the other axes keep this order.
            max_elements: Buckets whose sizes multiply to more are left out, except that the
                smallest batch rung of each item shape always stays, so that coverage holds.

        Raises:
            GridError: if `"batch"` is missing or the cap is below 1.
        """
        if BATCH not in ladders:
            raise GridError(f"A grid needs a ladder for {BATCH!r}; got axes {tuple(ladders)}.")
        if max_elements is not None and max_elements < 1:
            raise GridError(f"max_elements must be at least 1; got {max_elements}.")
        axes = (BATCH, *(axis for axis in ladders if axis != BATCH))
        cap = math.inf if max_elements is None else max_elements
        smallest = ladders[BATCH].rungs[0]
        sizes = itertools.product(*(ladders[axis] for axis in axes))
        return cls(axes, (Bucket(axes, s) for s in sizes if math.prod(s) <= cap or s[0] == smallest))

    @classmethod
    def explicit(cls, axes: tuple[str, ...], sizes: Iterable[Sequence[int]]) -> "Grid":
        """The grid of the buckets whose sizes are listed, batch size first."""
        return cls(axes, (Bucket(axes, tuple(one)) for one in sizes))

    @classmethod
    def parse(cls, text: str, axes: tuple[str, ...]) -> "Grid":
        """The grid written as `1x64,8x64,1x512`: buckets separated by commas or blanks."""
        return cls(axes, (Bucket.parse(word, axes) for word in text.replace(",", " ").split()))

    @property
    def limits(self) -> dict[str, int]:
        """The largest size of each axis over all buckets, `batch` included."""
        return {axis: rungs[-1] for axis, rungs in zip(self.axes, self._rungs, strict=True)}

    @property
    def max_rows(self) -> int:
        """The largest batch size of any bucket."""
        return self._rungs[0][-1]

    def rungs(self, axis: str) -> tuple[int, ...]:
        """The distinct sizes that buckets have on one axis, rising."""
        if axis not in self.axes:
            raise GridError(f"A grid's axis is one of {self.axes}; got {axis!r}.")
        return self._rungs[self.axes.index(axis)]

    def max_rows_for(self, item_sizes: tuple[int, ...]) -> int:
        """The most items of this size that one bucket takes.

        Raises:
            DoesNotFit: if not even one does.
        """
        return max([bucket.rows for bucket in self._some(1, item_sizes)])

    def candidates(self, rows: int, item_sizes: tuple[int, ...]) -> tuple[Bucket, ...]:
        """Every bucket that holds the shape, fewest elements first; empty if none does.

        The answer depends only on the next rung of each axis, so it is remembered by rungs.
        """
        wanted = (rows, *item_sizes)
        if len(wanted) != len(self.axes):
            raise GridError(f"A shape needs one size for each of the axes {self.axes}; got {wanted}.")
        key = tuple(map(bisect_left, self._rungs, wanted))
        found = self._found.get(key)
        if found is None:
            found = tuple(b for b in self._by_elements if b.holds(rows, tuple(item_sizes)))
            self._found[key] = found
        return found

    def smallest(self, rows: int, item_sizes: tuple[int, ...]) -> Bucket:
        """The bucket with the fewest elements that holds the shape.

        Raises:
            DoesNotFit: if none does; the message names the nearest bucket.
        """
        return self._some(rows, item_sizes)[0]

    def nearest(self, rows: int, item_sizes: tuple[int, ...]) -> Bucket:
        """The bucket that comes closest to holding the shape, for messages.

        Closest means the smallest product of (wanted / given) over the axes that fall short.
        """

        def shortfall(bucket: Bucket) -> tuple[float, int]:
            pairs = zip((rows, *item_sizes), bucket.sizes, strict=True)
            return math.prod(max(1.0, want / have) for want, have in pairs), bucket.elements

        return min(self.buckets, key=shortfall)

    def without(self, bucket: Bucket) -> "Grid":
        """The grid that lacks one bucket.

        Raises:
            GridError: if it is not in the grid or is the only one.
        """
        if bucket not in self:
            raise GridError(f"Only a bucket of the grid can be left out; got {bucket}.")
        return Grid(self.axes, (other for other in self.buckets if other != bucket))

    def check_coverage(self, limits: Mapping[str, int], *, split: bool = True) -> None:
        """Prove that every admissible shape has a bucket, or a split into shapes that have one.

        A bucket that holds a shape holds every smaller one, so a whole box of shapes is covered as
        soon as its largest corner is: one test stands for all of them. Rows can be split down to
        single ones, so with splitting the corner is one row of the largest item; without, it is the
        largest batch of the largest item. If the corner is not held, the first shape without a
        bucket is found axis by axis: with the earlier axes fixed and the later ones at their limit,
        the answer changes only just above a rung, so those are the only sizes to try.

        Args:
            limits: The largest admissible size of each item axis, and of `batch` if rows may not
                be split.
            split: Whether more rows than a bucket has may run as several batches.

        Raises:
            CoverageError: naming the first such shape and the bucket nearest to it.
            GridError: if a limit is missing, unknown or below 1.
        """
        corner = self._corner(limits, split)
        if self.candidates(corner[0], corner[1:]):
            return
        shape = list(corner)
        for place, rungs in enumerate(self._rungs):
            steps = sorted({1, *(rung + 1 for rung in rungs)})
            tries = ((*shape[:place], size, *shape[place + 1 :]) for size in steps)
            shape = list(next(one for one in tries if not self.candidates(one[0], one[1:])))
        named = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, shape, strict=True))
        near = self.nearest(shape[0], tuple(shape[1:]))
        raise CoverageError(
            f"Every admissible shape needs a bucket{' or a split' if split else ''}; {named} has none, the "
            f"nearest bucket is {near}. Add a bucket that holds {'x'.join(map(str, corner))} or lower the "
            "limits."
        )

    def _corner(self, limits: Mapping[str, int], split: bool) -> tuple[int, ...]:
        needed = self.item_axes if split else self.axes
        if not set(needed) <= set(limits) or not set(limits) <= set(self.axes):
            raise GridError(f"Limits are needed for {needed} and known for {self.axes}; got {dict(limits)}.")
        for axis, limit in limits.items():
            if limit < 1:
                raise GridError(f"A limit is at least 1; got {limit} for {axis}.")
        return (1 if split else limits[BATCH], *(limits[axis] for axis in self.item_axes))

    def _some(self, rows: int, item_sizes: tuple[int, ...]) -> tuple[Bucket, ...]:
        found = self.candidates(rows, item_sizes)
        if not found:
            wanted = "x".join(map(str, (rows, *item_sizes)))
            raise DoesNotFit(
                f"A shape ({' x '.join(self.axes)}) must fit a bucket; {wanted} fits none, the nearest is "
                f"{self.nearest(rows, item_sizes)}. Split the rows, cut the item or raise the limits."
            )
        return found

    def __contains__(self, bucket: object) -> bool:
        return bucket in self.buckets

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return self is other or (self.axes == other.axes and self.buckets == other.buckets)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Grid.parse({' '.join(map(str, self.buckets))!r}, {self.axes!r})"
