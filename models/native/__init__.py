"""Products of a matrix in panels as a custom call of XLA:CPU, compiled by LLVM when it is first asked for."""

from .kernel import available, product
from .target import Tile, tile

__all__ = ["Tile", "available", "product", "tile"]
