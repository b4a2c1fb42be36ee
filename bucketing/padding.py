"""Writing ragged items into one buffer, and the masks and lengths that tell them from padding.

The functions write into buffers that already exist, so that a server in its steady state allocates
nothing. Whatever a buffer held before is overwritten; nothing lives into the next run.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import PaddingError


def pad_rows(out: NDArray[np.generic], arrays: Sequence[ArrayLike], pad: complex | bool) -> None:
    """Write items into the first corner of consecutive rows and `pad` everywhere else.

    Only what no item covers is filled.

    Args:
        out: `(batch, *dims)`, any dtype; completely overwritten.
        arrays: At most `batch` arrays, each with as many dims as an item of `out` and none larger.
        pad: The value of all padding, in the range of `out.dtype`.

    Raises:
        PaddingError: if there are too many arrays, or one has other dims, is larger, or has a dtype
            that does not go into `out.dtype` without changing kind.
    """
    if len(arrays) > len(out):
        raise PaddingError(f"A batch of {len(out)} rows takes at most that many items; got {len(arrays)}.")
    dims = out.shape[1:]
    for row, given in enumerate(arrays):
        item = np.asarray(given)
        if item.dtype != out.dtype and not np.can_cast(item.dtype, out.dtype, "same_kind"):
            raise PaddingError(
                f"Item {row} must be castable to {out.dtype}; got {item.dtype}. Convert it first."
            )
        if item.shape == dims:
            out[row] = item
            continue
        if item.ndim != len(dims) or any(map(int.__gt__, item.shape, dims)):
            raise PaddingError(
                f"Item {row} must fit into {dims}; got shape {item.shape}. Take a larger bucket."
            )
        target = out[row]
        target[tuple(map(slice, item.shape))] = item
        # Peel one axis at a time: what lies beyond the item on it, within the item on those before.
        inner: tuple[slice, ...] = ()
        for size, full in zip(item.shape, dims, strict=True):
            if size < full:
                target[(*inner, slice(size, None))] = pad
            inner = (*inner, slice(size))
    if len(arrays) < len(out):
        out[len(arrays) :] = pad


def fill_mask(out: NDArray[np.generic], sizes: ArrayLike) -> None:
    """Write 1 (or True) where a row has real elements and 0 on all padding.

    Args:
        out: `(batch, *axes)`, bool or a number type; completely overwritten.
        sizes: `(rows, axes)` integers, one size for each axis of `out`; rows beyond are padding.

    Raises:
        PaddingError: if there are too many rows, the wrong number of axes, or a size beyond `out`.
    """
    real = _real_sizes(sizes, len(out), out.shape[1:])
    inside: NDArray[np.bool_] = np.ones((len(real), *[1] * (out.ndim - 1)), bool)
    for axis, full in enumerate(out.shape[1:]):
        spread = [1] * out.ndim
        spread[axis + 1] = full
        along = np.arange(full).reshape(spread) < real[:, axis].reshape(-1, *[1] * (out.ndim - 1))
        inside = along if axis == 0 else inside & along
    out[: len(real)] = inside
    out[len(real) :] = 0


def fill_lengths(out: NDArray[np.generic], lengths: ArrayLike) -> None:
    """Write the length of each row, and 0 for rows that are only padding.

    Args:
        out: `(batch,)` integers; completely overwritten.
        lengths: `(rows,)` integers.

    Raises:
        PaddingError: if there are more lengths than rows, or one is negative or no integer.
    """
    real = np.asarray(lengths)
    if (
        real.ndim != 1
        or len(real) > len(out)
        or (real.size and (real.dtype.kind not in "iu" or real.min() < 0))
    ):
        raise PaddingError(
            f"Lengths are at most {len(out)} integers of at least 0; got {real.dtype} {real.shape}: {real}."
        )
    out[: len(real)] = real
    out[len(real) :] = 0


def _real_sizes(sizes: ArrayLike, batch: int, axes: tuple[int, ...]) -> NDArray[np.int64]:
    real = np.asarray(sizes)
    if real.size == 0 and real.ndim < 2:
        real = real.reshape(0, len(axes)).astype(np.int64)
    if real.ndim != 2 or real.shape[1] != len(axes) or len(real) > batch:
        raise PaddingError(
            f"Sizes have the shape (rows, {len(axes)}) with at most {batch} rows; got {real.shape}."
        )
    if real.size and (real.dtype.kind not in "iu" or (real < 0).any() or (real > np.asarray(axes)).any()):
        raise PaddingError(f"Sizes are integers from 0 to {axes}; got {real.dtype} {real.tolist()}.")
    return real.astype(np.int64, copy=False)
