"""In which numbers a model's matrices are held and multiplied."""

from typing import Literal

from .errors import UnsupportedModel

Weights = Literal["float32", "bfloat16", "int8"]


def chosen(dtype: str | None, quantize: str | None) -> Weights:
    """What the two options of `load` ask for together.

    Args:
        dtype: `float32` or `bfloat16`; None for float32.
        quantize: `int8`; None for none.

    Raises:
        UnsupportedModel: one of them is none of these, or both are given.
    """
    if quantize not in (None, "int8"):
        raise UnsupportedModel(f"quantize must be int8 or left out, got {quantize!r}: choose one of them")
    if dtype not in (None, "float32", "bfloat16"):
        raise UnsupportedModel(
            f"dtype must be float32 or bfloat16 or left out, got {dtype!r}: choose one of them"
        )
    if quantize is None:
        return "bfloat16" if dtype == "bfloat16" else "float32"
    if dtype is not None:
        raise UnsupportedModel(
            f"quantize brings numbers of its own and takes no dtype beside it, got quantize={quantize!r} and "
            f"dtype={dtype!r}: leave one of them out"
        )
    return "int8"
