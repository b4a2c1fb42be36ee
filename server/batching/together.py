"""Runs that were planned before they were sent: a caller who knows all of its rows packs them better.

Each comes as a request of its own. It waits for its turn like any other, and then runs whole, in the bucket
that was chosen for it, as long as the buckets are those that it was planned with; else its rows are planned
like others, and so they are where others whose turn it is would cut the run in two.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ...bucketing import Bucket, Planner

if TYPE_CHECKING:
    from .request import Row


class Together(NamedTuple):
    """One such run.

    Attributes:
        planner: whose buckets it was planned with.
        bucket: where all rows of the request run together.
    """

    planner: Planner
    bucket: Bucket


_RUN: ContextVar[Together | None] = ContextVar("servax_run", default=None)


@contextlib.contextmanager
def as_run(planner: Planner, bucket: Bucket) -> Iterator[None]:
    """The request that is made inside is one run in this bucket, of rows that it was planned to hold."""
    token = _RUN.set(Together(planner, bucket))
    try:
        yield
    finally:
        _RUN.reset(token)


def run_of_call() -> Together | None:
    """The run that the call in hand is, if it is one."""
    return _RUN.get()


def apart(row: "Row", planner: Planner) -> bool:
    """Whether a row runs with those that it was planned with."""
    together = row.request.together
    return together is not None and together.planner is planner


def run_in(window: "Sequence[Row]", planner: Planner) -> "tuple[Row, ...]":
    """Rows of the first planned run in a window, as far as the window holds them."""
    request = next((row.request for row in window if apart(row, planner)), None)
    return tuple([row for row in window if row.request is request])
