"""Which programs of a model stay in memory, and which are worth loading; pure, for one thread.

The cap is in bytes. What leaves is what was asked for least lately, and a program comes in by another's
place only if it is asked for more often than that one (the admission rule of TinyLFU; Einziger, Friedman and
Manes 2017), so that more buckets than fit, used in turn, do not chase each other out.
"""

from collections.abc import Collection

from ..bucketing import Bucket, DoesNotFit, Grid

_HALVE_AT = 512.0


class Residency:
    """The books of one model's programs.

    Args:
        grid: every bucket that may be asked for.
        pinned: buckets that never leave, such as the one that covers every request.
        max_bytes: most bytes of all programs together; None for no bound.

    Attributes:
        cold_hits: batches that ran elsewhere since the bucket made for them was not in memory.
        complete: whether every bucket of the grid is in memory, so that nothing has to be counted.
    """

    def __init__(self, grid: Grid, pinned: Collection[Bucket], max_bytes: int | None = None) -> None:
        self._grid = grid
        self._pinned = frozenset(pinned)
        self._max_bytes = max_bytes
        self._bytes: dict[Bucket, int] = {}
        self._resident: set[Bucket] = set()
        self._demand: dict[Bucket, float] = {}
        self._last: dict[Bucket, int] = {}
        self._clock = 0
        self.cold_hits = 0
        self.complete = False

    @property
    def nbytes(self) -> int:
        """Bytes of the programs in memory."""
        return sum(self._bytes[one] for one in self._resident)

    def replan(self, grid: Grid) -> None:
        """From now on these buckets are asked for; what is not among them has left."""
        self._grid = grid
        self._resident &= set(grid)
        self._count()

    def launched(self, rows: int, sizes: tuple[int, ...]) -> Bucket | None:
        """A batch was launched somewhere.

        Args:
            rows: its rows, at most the grid's.
            sizes: the largest of its rows on each axis.

        Returns:
            The bucket made for it, if that is not in memory and worth loading; None otherwise.
        """
        try:
            wanted = self._grid.smallest(rows, sizes)
        except DoesNotFit:  # it ran in a bucket of a grid that is yet to be swapped in
            return None
        self._clock += 1
        self._last[wanted] = self._clock
        self._demand[wanted] = self._demand.get(wanted, 0.0) + 1.0
        if self._clock % _HALVE_AT == 0:
            self._demand = {one: count / 2 for one, count in self._demand.items()}
        if wanted in self._resident:
            return None
        self.cold_hits += 1
        largest = max(self._bytes.values(), default=0)
        leaving = self._leaving(wanted, self._bytes.get(wanted, largest))
        mine = self._demand[wanted]
        return wanted if all(self._demand.get(one, 0.0) < mine for one in leaving) else None

    def opened(self, bucket: Bucket, nbytes: int) -> list[Bucket]:
        """A program came into memory.

        Args:
            bucket: which.
            nbytes: its size.

        Returns:
            Programs that must leave for it, the least asked for first; they count as gone.
        """
        self._bytes[bucket] = nbytes
        self._last.setdefault(bucket, self._clock)
        leaving = self._leaving(bucket, nbytes)
        self._resident.add(bucket)
        self._resident.difference_update(leaving)
        self._count()
        return leaving

    def _count(self) -> None:
        self.complete = self._resident.issuperset(self._grid)

    def _leaving(self, bucket: Bucket, nbytes: int) -> list[Bucket]:
        if self._max_bytes is None:
            return []
        others = self._resident - {bucket}
        excess = sum(self._bytes[one] for one in others) + nbytes - self._max_bytes
        leaving = []
        free = others - self._pinned
        for one in sorted(free, key=lambda one: (self._demand.get(one, 0.0), self._last.get(one, 0))):
            if excess <= 0:
                break
            leaving.append(one)
            excess -= self._bytes[one]
        return leaving
