"""What a servable returns, and how a batch of it is cut back to its items."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .dims import Evaluate, compile_dim, evaluate_dim
from .errors import OutputError
from .signature import Dim

__all__ = ["Output", "Outputs", "evaluate_dim"]

_Dims = tuple[int | Evaluate, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what the model returns.

    Attributes:
        name: its path in the returned tree, as the wire protocols show it.
        dtype: NumPy dtype.
        dims: dims of one item (no batch): numbers, axis names or expressions of axis names.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Dims of one item; a ``str`` varies with the item's size."""
        return self.dims

    @property
    def fixed(self) -> bool:
        """Whether every item has the same shape, so that rows need no cutting."""
        return all(isinstance(dim, int) for dim in self.dims)


@dataclass(frozen=True)
class Outputs:
    """All outputs of a servable.

    Attributes:
        leaves: in the order of the flattened tree.
        treedef: structure that the model returns.
        axes: varying axes of the inputs, in the order of item sizes.
    """

    leaves: tuple[Output, ...]
    treedef: Any
    axes: tuple[str, ...]

    @cached_property
    def _dims(self) -> tuple[_Dims, ...]:
        """Dims of each leaf, the expressions read once."""
        return tuple(self._compiled(leaf) for leaf in self.leaves)

    def _compiled(self, leaf: Output) -> _Dims:
        return tuple(dim if isinstance(dim, int) else compile_dim(dim, self.axes) for dim in leaf.dims)

    def item_shape(self, leaf: Output, sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of one item's output at the item's sizes."""
        return _at(self._compiled(leaf), sizes)

    def cut(self, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Cut a batch's outputs back to its items.

        Args:
            arrays: one array ``(batch, *padded dims)`` for each leaf.
            sizes: sizes of the real items, in row order; rows after them are padding.

        Returns:
            For each item, its own arrays (copies: nothing is shared between replies or with the device).

        Raises:
            OutputError: if an item's output is larger than what the model returned.
        """
        rows: list[list[np.ndarray]] = [[] for _ in sizes]
        for leaf, dims, array in zip(self.leaves, self._dims, arrays, strict=True):
            if array.shape[1:] == leaf.dims:
                for row, out in enumerate(rows):
                    # The explicit form keeps a 0-d item an array; array[row] would give a scalar.
                    out.append(array[row, ...].copy())
                continue
            for row, out in enumerate(rows):
                out.append(_cut_one(leaf, array[row, ...], _at(dims, sizes[row])))
        return rows

    def check_batch(self, arrays: Sequence[Any], rows: int) -> None:
        """Check that every leaf has as many rows as the bucket.

        Args:
            arrays: one array, or anything with its ``shape``, for each leaf.
            rows: the bucket's.

        Raises:
            OutputError: if the model returned another number of rows.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            if not array.shape or array.shape[0] != rows:
                got = f"{array.shape[0]}" if array.shape else "no batch dim"
                raise OutputError(f"output {leaf.name!r}: expected {rows} rows, got {got}")

    def check_program(self, shapes: Sequence[Any], treedef: Any, rows: int, sizes: Sequence[int]) -> None:
        """Check what one program returns, before it is ever run.

        Args:
            shapes: shape and dtype of each leaf, at the bucket.
            treedef: structure of what the program returns.
            rows: rows of the bucket.
            sizes: the bucket's other sizes.

        Raises:
            OutputError: if the structure, a dtype or the number of rows is another, or a dim is too small
                to cut the largest item of the bucket from it.
        """
        if not same_structure(treedef, self.treedef):
            raise OutputError(
                f"a model returns the same structure at every size; expected {self.treedef}, got {treedef}"
            )
        self.check_batch(shapes, rows)
        for leaf, given in zip(self.leaves, shapes, strict=True):
            wanted = self.item_shape(leaf, sizes)
            got = tuple(given.shape[1:])
            fits = len(wanted) == len(got) and all(0 <= w <= g for w, g in zip(wanted, got, strict=True))
            if not fits or given.dtype != leaf.dtype:
                raise OutputError(
                    f"output {leaf.name!r}: expected {leaf.dtype}{list(wanted)} for the largest item, from "
                    f"the dims {list(leaf.dims)}, got {given.dtype}{list(got)}: declare the output by hand"
                )


def same_structure(one: Any, other: Any) -> bool:
    """Whether two trees are alike; a class that a factory makes anew at each call counts as the same."""
    return bool(one == other) or str(one) == str(other)


def _at(dims: _Dims, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else dim(sizes) for dim in dims)


def _cut_one(leaf: Output, padded: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    piece: np.ndarray = padded[tuple(map(slice, shape))] if padded.ndim == len(shape) else padded
    # Slices never raise: a dim that is too large, or negative, would give less than was promised.
    if piece.shape != shape:
        raise OutputError(
            f"output {leaf.name!r} has dims {list(leaf.dims)} for one item, here {list(shape)}; the model "
            f"returned {list(padded.shape)}: declare the output's dims by hand"
        )
    return piece.copy()
