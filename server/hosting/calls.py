"""From the arguments of a Python call to rows, and from rows of outputs to what the model returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import BadTensor
from .door import Rows
from .model import Model


@dataclass(frozen=True, slots=True)
class Call:
    """What a Python call asks for.

    Attributes:
        model: whom.
        rows: arrays of each row by input name.
        single: whether it was one item, without a batch dim.
        given: what was passed, by input name.
    """

    model: Model
    rows: Rows
    single: bool
    given: Mapping[str, np.ndarray]

    def answer(self, results: Sequence[Sequence[np.ndarray]]) -> Any:
        """The model's output tree: of the one row, or of all rows stacked ``(rows, ...)``."""
        outputs = self.model.servable.outputs
        if self.single:
            return jax.tree.unflatten(outputs.treedef, results[0])
        leaves = [np.stack(column) for column in zip(*results, strict=True)] if results else self._empty()
        return jax.tree.unflatten(outputs.treedef, leaves)

    def _empty(self) -> list[np.ndarray]:
        signature, outputs = self.model.servable.signature, self.model.servable.outputs
        sizes: dict[str, int] = {}
        for one in signature.inputs:
            if one.name in self.given:
                pairs = zip(one.dims, self.given[one.name].shape[1:], strict=False)
                sizes |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        item = [sizes.get(axis, 0) for axis in signature.axes]
        return [np.zeros((0, *outputs.item_shape(leaf, item)), leaf.dtype) for leaf in outputs.leaves]


def read_call(model: Model, args: tuple[Any, ...], inputs: dict[str, Any]) -> Call:
    """Read the arguments of a call: one item, or rows of one size.

    Raises:
        TypeError: wrong names, or inputs with different numbers of rows.
        BadTensor: an input that is no rectangular array.
    """
    names = [one.name for one in model.inputs]
    if len(args) > len(names) or any(name in inputs for name in names[: len(args)]):
        raise TypeError(
            f"model {model.name!r} takes the inputs {names}; got {len(args)} positional and {sorted(inputs)}"
        )
    given = dict(zip(names, args, strict=False)) | inputs
    first = next((one for one in model.inputs if one.name in given), None)
    if first is None or any(name not in names for name in given):
        return Call(model, [given], True, {})  # whose names are refused with those that are right
    try:
        arrays = {name: np.asarray(value) for name, value in given.items()}
    except ValueError as error:
        raise BadTensor(
            f"an input of one call is a rectangular array; got rows of several sizes ({error}): use map"
        ) from None
    if arrays[first.name].ndim == len(first.dims):
        return Call(model, [arrays], True, arrays)
    for one in model.inputs:
        array = arrays.get(one.name)
        if array is not None and array.ndim <= len(one.dims):
            raise BadTensor(
                f"input {one.name!r} has {len(one.dims)} dims for one item and one more for rows; got "
                f"{array.ndim} with {first.name!r} as rows: reshape it"
            )
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise TypeError(f"the inputs of a batch have the same number of rows; got {counts}")
    rows = [{name: array[row] for name, array in arrays.items()} for row in range(counts[first.name])]
    return Call(model, rows, False, arrays)
