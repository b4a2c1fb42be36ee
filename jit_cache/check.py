"""The door: one item is checked against the declared inputs and brought into their form."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .dtypes import integer_bounds, is_float, is_integer
from .errors import InputError, ItemTooLarge, NonFinite
from .signature import Input, Signature


def check_item(
    signature: Signature,
    item: Mapping[str, Any],
    limits: Mapping[str, int],
    *,
    allow_nonfinite: bool = False,
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Check one item at the door and bring it into the declared form.

    Args:
        signature: the declared inputs.
        item: array-likes by input name, without a batch dim.
        limits: largest size of each varying axis.
        allow_nonfinite: whether NaN and infinity may pass in float inputs.

    Returns:
        The arrays (declared dtypes; a copy only where a cast was needed) and the item's sizes in the
        order of ``signature.axes``. An optional input that is missing or None is all padding.

    Raises:
        InputError: unknown or missing names, a dtype that cannot be cast without loss, a wrong rank or
            fixed dim, an axis whose size differs between inputs, an empty axis.
        ItemTooLarge: an axis beyond its limit.
        NonFinite: NaN or infinity where refused.
    """
    names = [one.name for one in signature.inputs]
    if not isinstance(item, Mapping):
        raise InputError(
            f"an item is a mapping from the inputs {names} to arrays; got {type(item).__name__}: send one"
        )
    if unknown := [name for name in item if name not in names]:
        raise InputError(f"inputs are {names}; got unknown {unknown}: leave it out")
    sizes: dict[str, int] = {}
    arrays: dict[str, np.ndarray] = {}
    absent: list[Input] = []
    for one in signature.inputs:
        value = item.get(one.name)
        if value is None and one.optional:
            absent.append(one)
            continue
        if value is None:
            what = "None" if one.name in item else "missing"
            raise InputError(f"inputs are {names}; {one.name!r} is {what}: send it")
        array = cast_exact(one.name, value, one.dtype)
        _check_dims(one, array.shape, sizes, limits)
        if not allow_nonfinite and is_float(one.dtype) and not np.isfinite(array).all():
            raise NonFinite(
                f"input {one.name!r} must be finite; it holds NaN or infinity: clean it, or declare the "
                f"servable with allow_nonfinite=True"
            )
        arrays[one.name] = array
    for one in absent:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in one.dims]
        arrays[one.name] = np.full(shape, one.pad, one.dtype)
    return arrays, tuple(sizes[axis] for axis in signature.axes)


def _check_dims(one: Input, shape: Sequence[int], sizes: dict[str, int], limits: Mapping[str, int]) -> None:
    if len(shape) != len(one.dims):
        raise InputError(
            f"input {one.name!r} has dims {list(one.dims)} for one item; got shape {list(shape)}: send "
            f"{len(one.dims)} dims"
        )
    for dim, size in zip(one.dims, shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(
                    f"input {one.name!r} has dims {list(one.dims)}; got shape {list(shape)}, where {size} "
                    f"must be {dim}"
                )
            continue
        if size == 0:
            raise InputError(
                f"axis {dim!r} must not be empty; input {one.name!r} has shape {list(shape)}: send at least 1"
            )
        if size > limits[dim]:
            raise ItemTooLarge(
                f"axis {dim!r} is limited to {limits[dim]}; input {one.name!r} has {size}: send at most "
                f"{limits[dim]}, or raise the limit of the servable"
            )
        if sizes.setdefault(dim, size) != size:
            raise InputError(
                f"all inputs of an item share the size of axis {dim!r}, here {sizes[dim]}; input "
                f"{one.name!r} has {size}: make them equal"
            )


def cast_exact(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Bring a value to a dtype if its meaning is kept.

    Integers may change width where they are in range, 0 and 1 may become bool, and any real number may
    become a float, rounded, but not so large that it overflows. Nothing else is cast.

    Raises:
        InputError: if it is no array, or the cast would change the values' meaning.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"input {name!r} must be a rectangular array: {error}") from None
    if array.dtype == dtype:
        return array
    if not is_integer(array.dtype) and not is_float(array.dtype) and array.dtype.kind != "b":
        raise InputError(f"input {name!r} has dtype {dtype}; got {array.dtype}: send numbers")
    if array.size == 0:
        # [] has no dtype of its own; whether its shape is allowed is the next question.
        return np.zeros(array.shape, dtype)
    if is_float(dtype) and (dtype.kind == "c" or array.dtype.kind != "c"):
        return _to_float(name, array, dtype)
    if is_integer(array.dtype) and not is_float(dtype):
        return _to_integer(name, array, dtype)
    raise InputError(f"input {name!r} has dtype {dtype}; got {array.dtype}: cast it before sending")


def _to_integer(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    low, high = integer_bounds(dtype)
    least, most = int(array.min()), int(array.max())
    if least < low or most > high:
        raise InputError(
            f"input {name!r} has dtype {dtype}, {low} to {high}; got {array.dtype} values from {least} to "
            f"{most}: send values in range"
        )
    return array.astype(dtype)


def _to_float(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    lost = ~np.isfinite(cast)
    if lost.any() and (not is_float(array.dtype) or np.isfinite(array[lost]).any()):
        raise InputError(
            f"input {name!r} has dtype {dtype}; got {array.dtype} values beyond its range: send smaller ones"
        )
    return cast
