"""Kernels for CPUs as custom calls of XLA, in LLVM assembly that is compiled when they are first asked for.

`kernel` multiplies by matrices in panels and `integers` by those of int8, `self_attention` attends within
rows of texts and `paged_attention` to a paged pool. Where there is no llvmlite, or none of these processors,
or a trial fails, models use what XLA makes.
"""

from . import integers, paged_attention, self_attention
from .kernel import available, product
from .target import Tile, tile

__all__ = ["Tile", "available", "product", "register", "tile"]


def register() -> None:
    """Tell XLA of all kernels, for programs that were made elsewhere."""
    available()
    integers.available()
    self_attention.available()
    for dtype in ("float32", "float16"):
        paged_attention.available(dtype)
