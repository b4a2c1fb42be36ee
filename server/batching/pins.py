"""Pinned requests: each row runs in the one bucket made for its size, whatever else waits.

Within one bucket an answer does not depend on place, neighbours or padding, bit by bit; across buckets it
may, in the last digits. So a pinned row has the same answer at any load, at the cost of small batches.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...bucketing import Bucket, Grid

if TYPE_CHECKING:
    from .request import Row

__all__ = ["Pin", "pin_of_call", "pinned", "pinned_rows"]


@dataclass(slots=True)
class Pin:
    """Where the rows of pinned requests ran.

    Attributes:
        buckets: of each row, in the order of the requests; None until it was launched.
    """

    buckets: list[Bucket | None] = field(default_factory=list)


_PIN: ContextVar[Pin | None] = ContextVar("servax_pin", default=None)


@contextlib.contextmanager
def pinned() -> Iterator[Pin]:
    """Pin the requests that are made inside: the same answers, bit by bit, at any load.

    Yields:
        Where each row ran, once it was answered. Sizes that are fitted anew may change the buckets.
    """
    pin = Pin()
    token = _PIN.set(pin)
    try:
        yield pin
    finally:
        _PIN.reset(token)


def pin_of_call() -> Pin | None:
    """The pin of the call in hand, if it is pinned."""
    return _PIN.get()


def pinned_rows(window: "Sequence[Row]", grid: Grid, *, alone: bool = False) -> "tuple[Bucket, list[Row]]":
    """The bucket of a window's first row, which is pinned, and the pinned rows that run there with it.

    Args:
        window: waiting rows.
        grid: the buckets that are warm.
        alone: whether a row's place depends on its neighbours, as it does where rows are packed.
    """
    bucket = grid.smallest(1, window[0].sizes)
    window = window[:1] if alone else window
    rows = [
        row
        for row in window
        if row.request.pin is not None
        and bucket.holds(1, row.sizes)
        and grid.smallest(1, row.sizes) == bucket
    ][: bucket.rows]
    for row in rows:
        if row.request.pin is not None:
            row.request.pin.buckets[row.request.pin_at + row.index] = bucket
    return bucket, rows
