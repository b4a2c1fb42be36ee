"""Packing: several short sequences in one row, kept apart by segment ids.

Ragged batching with static shapes. Attention must be limited to equal segment ids, and positions
restart in each segment, so that a packed sequence gets the answer it gets alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import PackingError


@dataclass(frozen=True, eq=False)
class Packing:
    """Where each sequence lies: its row, its first column and its segment in that row.

    Args:
        capacity: Columns of a row.
        lengths: `(n,)` int64, in the order the sequences were given.
        row: `(n,)` int64.
        start: `(n,)` int64, first column.
        segment: `(n,)` int64, counted from 1 in each row from left to right.
    """

    capacity: int
    lengths: NDArray[np.int64]
    row: NDArray[np.int64]
    start: NDArray[np.int64]
    segment: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """How many rows are used."""
        return int(self.row.max(initial=-1)) + 1

    @property
    def max_segments(self) -> int:
        """The most sequences in one row."""
        return int(self.segment.max(initial=0))

    @property
    def waste(self) -> float:
        """1 - real elements / elements of the used rows; 0 if nothing was packed."""
        return 1 - int(self.lengths.sum()) / (self.rows * self.capacity) if self.rows else 0.0

    @cached_property
    def _index(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row, column and position of every real element, sequence after sequence."""
        ends = np.cumsum(self.lengths)
        within = np.arange(int(self.lengths.sum())) - np.repeat(ends - self.lengths, self.lengths)
        return np.repeat(self.row, self.lengths), within + np.repeat(self.start, self.lengths), within

    def fill_segments(self, out: NDArray[np.generic]) -> None:
        """Write segment ids, from 1 in each row and 0 on padding, into `(batch, capacity)`."""
        self._check(out)
        rows, columns, _ = self._index
        out[...] = 0
        out[rows, columns] = np.repeat(self.segment, self.lengths)

    def fill_positions(self, out: NDArray[np.generic]) -> None:
        """Write positions, from 0 in each segment and 0 on padding, into `(batch, capacity)`."""
        self._check(out)
        rows, columns, within = self._index
        out[...] = 0
        out[rows, columns] = within

    def layout(self, batch: int | None = None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Segment ids and positions, both `(batch, capacity)` int32; by default of the used rows."""
        shape = (self.rows if batch is None else batch, self.capacity)
        segments, positions = np.empty(shape, np.int32), np.empty(shape, np.int32)
        self.fill_segments(segments)
        self.fill_positions(positions)
        return segments, positions

    def fill(self, out: NDArray[np.generic], arrays: Sequence[ArrayLike], pad: complex | bool) -> None:
        """Write the sequences to their places and `pad` everywhere else.

        Args:
            out: `(batch, capacity, *dims)`; completely overwritten.
            arrays: One `(length, *dims)` for each packed sequence, in the order they were given.
            pad: The value of padding.

        Raises:
            PackingError: if the arrays do not have the packed lengths or `out` has another shape.
        """
        self._check(out)
        items = [np.asarray(array) for array in arrays]
        if [len(item) for item in items] != self.lengths.tolist():
            raise PackingError(
                f"Arrays have the packed lengths {self.lengths.tolist()}; got "
                f"{[len(item) for item in items]}."
            )
        out[...] = pad
        for item, row, start in zip(items, self.row.tolist(), self.start.tolist(), strict=True):
            if item.shape[1:] != out.shape[2:] or not np.can_cast(item.dtype, out.dtype, "same_kind"):
                raise PackingError(
                    f"A sequence has items of shape {out.shape[2:]} castable to {out.dtype}; got "
                    f"{item.shape[1:]} of {item.dtype}."
                )
            out[row, start : start + len(item)] = item

    def gather(self, packed: NDArray[np.generic]) -> list[NDArray[np.generic]]:
        """The sequences cut out of `(batch, capacity, *dims)`, as views, in the order they were given."""
        self._check(packed)
        places = zip(self.row.tolist(), self.start.tolist(), self.lengths.tolist(), strict=True)
        return [packed[row, start : start + length] for row, start, length in places]

    def gather_pooled(self, pooled: NDArray[np.generic]) -> NDArray[np.generic]:
        """One entry a sequence from `(batch, segments, *dims)`, where segment s lies at s - 1.

        Raises:
            PackingError: if `pooled` has too few rows or segments.
        """
        if pooled.ndim < 2 or pooled.shape[0] < self.rows or pooled.shape[1] < self.max_segments:
            raise PackingError(
                f"Pooled outputs have the shape (at least {self.rows}, at least {self.max_segments}, ...); "
                f"got {pooled.shape}."
            )
        return pooled[self.row, self.segment - 1]

    def _check(self, array: NDArray[np.generic]) -> None:
        if array.ndim < 2 or array.shape[1] != self.capacity or array.shape[0] < self.rows:
            raise PackingError(
                f"A packed array has the shape (at least {self.rows}, {self.capacity}, ...); "
                f"got {array.shape}."
            )


def pack(lengths: ArrayLike, capacity: int, *, max_segments: int | None = None) -> Packing:
    """Best-fit decreasing: the longest first, each into the fullest row that still takes it.

    At most 11/9 of the fewest possible rows, plus 4 (Johnson 1973); n log n comparisons.

    Args:
        lengths: `(n,)` integers from 1 to `capacity`; none is an empty packing.
        capacity: Columns of a row.
        max_segments: Most sequences in one row; None for no bound.

    Raises:
        PackingError: if a length is below 1 or above `capacity`.
    """
    bins = Bins(capacity, max_segments)
    sizes = checked_lengths(lengths, capacity)
    order = np.argsort(-sizes, kind="stable").tolist()
    for index in order:
        bins.place(index, int(sizes[index]))
    return bins.packing(sizes)


class Bins:
    """Open rows with the free columns of each, in best-fit order."""

    def __init__(self, capacity: int, max_segments: int | None = None, max_rows: int | None = None) -> None:
        for name, value in (("capacity", capacity), ("max_segments", max_segments), ("max_rows", max_rows)):
            if value is not None and value < 1:
                raise PackingError(f"{name} is at least 1; got {value}.")
        self.capacity = capacity
        self._max_segments = capacity if max_segments is None else max_segments
        self._max_rows = max_rows
        self._free: list[tuple[int, int]] = []
        self._members: list[list[int]] = []

    def place(self, index: int, length: int) -> bool:
        """Put a sequence into the fullest row that takes it, else into a new row; False if none may open."""
        spot = bisect_left(self._free, (length, -1))
        if spot < len(self._free):
            free, row = self._free.pop(spot)
        elif self._max_rows is not None and len(self._members) >= self._max_rows:
            return False
        else:
            free, row = self.capacity, len(self._members)
            self._members.append([])
        self._members[row].append(index)
        if free > length and len(self._members[row]) < self._max_segments:
            insort(self._free, (free - length, row))
        return True

    def packing(self, lengths: NDArray[np.int64]) -> Packing:
        """The rows as they stand; `lengths` are those of the placed indices."""
        return self.kept(range(len(lengths)), lengths)

    def kept(self, indices: Sequence[int], lengths: NDArray[np.int64]) -> Packing:
        """The rows as they stand, of the placed indices alone; `lengths` are theirs, in the same order."""
        where = {index: place for place, index in enumerate(indices)}
        row, start, segment = (np.zeros(len(lengths), np.int64) for _ in range(3))
        for place, placed in enumerate(self._members):
            members = [where[index] for index in placed]
            taken = lengths[members]
            row[members] = place
            start[members] = np.cumsum(taken) - taken
            segment[members] = np.arange(1, len(members) + 1)
        return Packing(self.capacity, lengths, row, start, segment)


class StreamingPacker:
    """Best-fit packing of a live queue into batches of a fixed number of rows.

    Sequences are offered in order of arrival and never moved. The first one that no row takes is
    refused; the caller then flushes, runs the batch and offers it again, so nobody is overtaken by
    more than the sequences that still fit into the same batch.

    Args:
        rows: Rows of one batch.
        capacity: Columns of a row.
        max_segments: Most sequences in one row; None for no bound.
    """

    def __init__(self, rows: int, capacity: int, *, max_segments: int | None = None) -> None:
        self._shape = (rows, capacity, max_segments)
        self._bins = Bins(capacity, max_segments, rows)
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def waste(self) -> float:
        """Padding if the batch were flushed now: 1 - real / (rows x capacity)."""
        return 1 - sum(self._lengths) / (self._shape[0] * self._shape[1])

    def offer(self, length: int) -> bool:
        """Take a sequence into the open batch; False, and nothing changes, if no row takes it.

        Raises:
            PackingError: if the length is below 1 or above the capacity, so that it never fits.
        """
        checked_lengths([length], self._shape[1])
        placed = self._bins.place(len(self._lengths), length)
        if placed:
            self._lengths.append(int(length))
        return placed

    def flush(self) -> Packing:
        """The open batch, in the order of the offers it took; the next batch starts empty."""
        packing = self._bins.packing(np.array(self._lengths, np.int64))
        rows, capacity, max_segments = self._shape
        self._bins = Bins(capacity, max_segments, rows)
        self._lengths = []
        return packing


def checked_lengths(lengths: ArrayLike, capacity: int) -> NDArray[np.int64]:
    """The lengths as `(n,)` int64, or a PackingError."""
    sizes = np.asarray(lengths)
    if sizes.size == 0:
        return np.zeros(0, np.int64)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        raise PackingError(f"Lengths are integers of shape (n,); got {sizes.dtype} {sizes.shape}.")
    if sizes.min() < 1 or sizes.max() > capacity:
        wrong = sizes[(sizes < 1) | (sizes > capacity)][0]
        raise PackingError(f"A packed length is from 1 to the capacity of {capacity}; got {wrong}.")
    return sizes.astype(np.int64)
