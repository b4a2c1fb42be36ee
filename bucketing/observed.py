"""Observed sizes in one form, whatever they come as."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import TraceError
from .traffic import Histogram

Observed = Histogram | Mapping[int, float] | ArrayLike
"""A histogram, a mapping from size to count, or a list of the sizes themselves."""


def observed(sizes: Observed) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Distinct sizes, rising int64 `(n,)`, and their counts, float64 `(n,)`; n is at least 1.

    Sizes that were never counted are left out. Size 0 is kept: it pads to the smallest rung.

    Raises:
        TraceError: if nothing was observed, a size is negative or no integer, or a count is negative,
            NaN or infinite.
    """
    if isinstance(sizes, Histogram):
        values, counts = sizes.arrays()
    elif isinstance(sizes, Mapping):
        values = _integers(list(sizes.keys()))
        counts = np.array(list(sizes.values()), np.float64)
    else:
        values = _integers(sizes)
        counts = np.ones(len(values))
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise TraceError(f"Counts are finite numbers of at least 0; got {counts[~(counts >= 0)][:3]}.")
    values, counts = values[counts > 0], counts[counts > 0]
    if len(values) == 0:
        raise TraceError("At least one observed size is needed; the trace is empty.")
    distinct, inverse = np.unique(values, return_inverse=True)
    return distinct, np.bincount(inverse, weights=counts).astype(np.float64)


def _integers(sizes: ArrayLike) -> NDArray[np.int64]:
    values = np.asarray(sizes)
    if values.size == 0:
        return np.zeros(0, np.int64)
    if values.ndim != 1:
        raise TraceError(f"Sizes have the shape (n,); got {values.shape}.")
    if values.dtype.kind not in "iuf" or not (np.isfinite(values) & (values == np.floor(values))).all():
        raise TraceError(f"Sizes are whole numbers; got {values.dtype} {values[:5].tolist()}.")
    if values.min() < 0:
        raise TraceError(f"Sizes are at least 0; got {values.min()}.")
    return values.astype(np.int64)
