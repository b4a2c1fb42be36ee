"""int8 matrices in panels, for products with uint8 by the kernel of `native.integers`.

Four features of an output stand together, so that rows `(out, in)` become a panel as numbers of four bytes
do that are transposed.
"""

from collections.abc import Sequence

import numpy as np

from . import native
from .native import integers
from .panels import Array, Panels


def zeros(layers: int, outputs: int, features: int) -> Panels:
    """Room for matrices of all layers: values int8 `(layers, panels, ceil(features / 4), width, 4)`."""
    width, group = native.tile().width, integers.GROUP
    shape = (layers, -(-outputs // width), -(-features // group), width, group)
    return Panels(np.zeros(shape, np.int8), outputs, padding=-features % group)


def fill(into: Panels, layer: int, rows: Array) -> None:
    """Put a matrix, int8 `(out, in)`, in its place."""
    if into.padding:
        rows = np.pad(rows, ((0, 0), (0, into.padding)))
    fours = np.ascontiguousarray(rows).view(np.int32)  # (out, ceil(in / 4))
    panels = into.values[layer].view(np.int32)[..., 0]  # (panels, ceil(in / 4), width)
    width = panels.shape[2]
    for at, panel in enumerate(panels):
        some = fours[at * width : (at + 1) * width]
        panel[:, : len(some)] = some.T


def packed(matrices: Sequence[Array]) -> Panels:
    """Matrices int8 `(out, in)` of all layers."""
    whole = zeros(len(matrices), *matrices[0].shape)
    for layer, rows in enumerate(matrices):
        fill(whole, layer, rows)
    return whole


def columns(into: Panels, each: Sequence[Array]) -> Array:
    """A number for each output, `(out,)` of each layer, as the kernel takes it: `(layers, panels, width)`."""
    layers, panels, _, width, _ = into.values.shape
    whole = np.zeros((layers, panels * width), each[0].dtype)
    whole[:, : into.features] = np.stack(each)
    return whole.reshape(layers, panels, width)
