"""What is refused before it waits: pure checks of one call."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...jit_cache import InputError, ItemTooLarge, NonFinite, Servable, WarmupReport, check_item
from ..batching.request import DEFAULT_PRIORITY, PRIORITIES
from ..datatypes import all_finite
from ..errors import BadRequest, BadTensor, NonFiniteInput, NotReady, TooLong, TooManyRows

Rows = Sequence[Mapping[str, Any]]


def check_call(rows: int, max_rows: int, priority: int) -> None:
    """Refuse a call by its options.

    Raises:
        TooManyRows: more rows than one request may hold.
        BadRequest: a priority that is none.
    """
    if rows > max_rows:
        raise TooManyRows(f"one request holds at most {max_rows} rows; got {rows}: send several")
    if priority not in PRIORITIES:
        raise BadRequest(
            f"a priority is from {PRIORITIES[0]} (most urgent) to {PRIORITIES[-1]}; got {priority!r}: leave "
            f"it out for {DEFAULT_PRIORITY}"
        )


def not_ready(name: str, report: WarmupReport, total: int, *, lost: bool) -> NotReady:
    """What those hear who come before a model is warm.

    Args:
        name: of the model.
        report: of its warm-up.
        total: programs that are to be warm.
        lost: whether it never gets ready.
    """
    said = f"model {name!r} answers once it is warm; {len(report.warm)} of {total} programs are"
    if not lost:
        return NotReady(f"{said}: retry shortly")
    bucket, why = list(report.failed.items())[0]  # noqa: RUF015 (the warm-up may be adding to it)
    return NotReady(
        f"{said}, and bucket {bucket} failed, which is not tried again: mend what its error says and restart "
        f"the server; {why}",
        lasting=True,
    )


class Door:
    """Checks the rows of one servable and brings them into the declared form."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable
        self._axes = servable.signature.axes
        self._bounds = [(axis, servable.limits[axis]) for axis in self._axes]
        self._fixed: dict[int | str, int] = {}
        self._plain: list[tuple[str, np.dtype[Any], tuple[int | str, ...], bool]] = []
        for one in servable.signature.inputs:
            closely = one.dtype.kind not in "iub" and not servable.allow_nonfinite
            self._plain.append((one.name, one.dtype, one.dims, closely))
            # A fixed dim is its own name here.
            self._fixed |= {dim: dim for dim in one.dims if isinstance(dim, int)}

    def check(
        self, rows: Rows, first: int = 0
    ) -> tuple[list[Mapping[str, np.ndarray]], list[tuple[int, ...]]]:
        """Arrays and sizes of each row.

        Args:
            rows: arrays of each by input name.
            first: number of the first of them, for errors.

        Raises:
            TooLong, NonFiniteInput, BadTensor: naming the row, where there are several.
        """
        items, sizes = [], []
        for index, row in enumerate(rows, first):
            size = self._sizes_if_plain(row)
            item: Mapping[str, np.ndarray] = row
            if size is None:
                item, size = self._check_one(row, f"row {index}: " if first or len(rows) > 1 else "")
            items.append(item)
            sizes.append(size)
        return items, sizes

    def _sizes_if_plain(self, row: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Sizes of a row that has the declared form already; None if it must be looked at closely.

        A shortcut for what nearly every row is, a third of the time of `check_item`, which decides the rest.
        """
        if type(row) is not dict or len(row) != len(self._plain):
            return None
        sizes = self._fixed.copy()
        for name, dtype, dims, closely in self._plain:
            array = row.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.ndim != len(dims):
                return None
            for dim, size in zip(dims, array.shape):  # noqa: B905 (as many, see above)
                if sizes.setdefault(dim, size) != size:
                    return None
            if closely and not all_finite(array):
                return None
        for dim, limit in self._bounds:
            if not 0 < sizes[dim] <= limit:
                return None
        return tuple([sizes[axis] for axis in self._axes])

    def _check_one(self, row: Mapping[str, Any], where: str) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
        servable = self._servable
        try:
            return check_item(
                servable.signature, row, servable.limits, allow_nonfinite=servable.allow_nonfinite
            )
        except ItemTooLarge as error:
            raise TooLong(f"{where}{error}") from None
        except NonFinite as error:
            raise NonFiniteInput(f"{where}{error}") from None
        except InputError as error:
            raise BadTensor(f"{where}{error}") from None


def allowed_s(server_s: float | None, client_s: float | None) -> float:
    """Seconds that a request gets: the smallest of those that are set; None and 0 mean not set.

    Raises:
        BadRequest: if the client's is negative or not finite.
    """
    if client_s and not 0 < client_s < math.inf:
        raise BadRequest(f"a timeout is a positive number of seconds; got {client_s}: leave it out for none")
    return min(server_s or math.inf, client_s or math.inf)
