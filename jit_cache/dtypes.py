"""Which dtypes are integers, which are floats, and what they hold; those of ``ml_dtypes`` included.

NumPy sees only kind "V" in most of them (int4 and bfloat16 alike), so its own `numpy.issubdtype` cannot tell.
"""

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np

_BOOLS = {"0": False, "1": True, "false": False, "true": True}
_iinfo: Any = ml_dtypes.iinfo


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether it is a signed or unsigned integer; bool is not one."""
    return dtype.kind in "iu" or (dtype.kind == "V" and bool(jax.numpy.issubdtype(dtype, np.integer)))


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is a real or complex float, and so may hold NaN."""
    return dtype.kind in "fc" or (dtype.kind == "V" and bool(jax.numpy.issubdtype(dtype, np.inexact)))


def integer_bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Least and largest value of an integer dtype; 0 and 1 for bool."""
    if dtype.kind == "b":
        return 0, 1
    info = _iinfo(dtype)
    return int(info.min), int(info.max)


def parse_value(text: str, dtype: np.dtype[Any]) -> float | int | bool | None:
    """The number that a text writes, or None if the dtype does not hold it.

    Floats may be rounded but not overflow; NaN and infinity count where the dtype has them.
    """
    try:
        if dtype.kind == "b":
            return _BOOLS.get(text.lower())
        if is_integer(dtype):
            low, high = integer_bounds(dtype)
            return int(text) if low <= int(text) <= high else None
        number = float(text)
    except ValueError:
        return None
    with np.errstate(all="ignore"):
        kept = np.asarray(number).astype(dtype).astype(np.complex128).real
    same = np.isfinite(kept) if math.isfinite(number) else np.array_equal(kept, number, equal_nan=True)
    return number if same else None
