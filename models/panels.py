"""Matrices in panels, for products by the kernel of `native`: float32, on CPUs.

XLA:CPU rearranges a matrix at each product; here it is rearranged once. The products of MiniLM's layers take
1.1, 2.5 and 21.4 ms of two cores at 16, 48 and 512 tokens (XLA: 1.7, 3.3, 23.2), those of SmolLM2's layers
8.5, 9.8 and 18.3 ms at 1, 8 and 32 rows (XLA with matrices as `(out, in)`: 9.2, 15.1, 24.8).
"""

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import native

Array = np.ndarray[Any, Any]
_TABLES = ("word", "head")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("features",))
@dataclasses.dataclass(frozen=True)
class Panels:
    """The kernels of all layers, or a table of words.

    Attributes:
        values: float32 `(layers, panels, in, width)`; of a table, whose words are outputs, one layer.
        features: outputs, of which the last panel may hold fewer than `width`.
    """

    values: Any
    features: int


def panels(params: Mapping[str, Any], *, tables: bool) -> dict[str, Any]:
    """The same parameters with each layer's kernels in panels; other leaves as they are.

    Args:
        params: float32 NumPy arrays, layers stacked on axis 0, kernels `(layers, in, out)`; not changed.
        tables: whether tables `word` and `head`, `(words, in)`, are put in panels too: those that are
            multiplied by.
    """
    width = native.tile().width
    names = _multiplied(params) if tables else ()
    out = {name: _table(leaf, width) if name in names else leaf for name, leaf in params.items()}

    def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _kernels(leaf, width) if name == "kernel" else leaf for name, leaf in leaves.items()}

    out["layers"] = {name: split(leaves) for name, leaves in params["layers"].items()}
    return out


def product(kernels: Panels, layer: jax.Array, x: jax.Array) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`.

    Returns:
        float32 `(..., out)`; a row's numbers depend on no other row.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = native.product(flat, kernels.values, layer, features=kernels.features)
    return y.reshape(*x.shape[:-1], kernels.features)


def scores(table: Panels, x: jax.Array) -> jax.Array:
    """Products with each word of a table, float32 `(..., in)` to `(..., words)`."""
    return product(table, jnp.int32(0), x)


def rows(table: Panels, ids: jax.Array) -> jax.Array:
    """Words of a table, float32 `(count, in)`; `ids` int32 `(count,)`, those outside are clipped into it."""
    width = table.values.shape[-1]
    ids = jnp.clip(ids, 0, table.features - 1)
    found: jax.Array = table.values[0][ids // width, :, ids % width]
    return found


def _multiplied(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The table that gives the scores: the words' own where there is no other."""
    return ("head",) if "head" in params else ("word",)


def _table(table: Array, width: int) -> Panels:
    words, features = table.shape
    values = np.zeros((1, -(-words // width), features, width), np.float32)
    full = words // width
    values[0, :full] = table[: full * width].reshape(full, width, features).transpose(0, 2, 1)
    if words % width:
        values[0, full, :, : words % width] = table[full * width :].T
    return Panels(values, words)


def _kernels(stacked: Array, width: int) -> Panels:
    layers, features, outputs = stacked.shape
    values = np.zeros((layers, -(-outputs // width), features, width), np.float32)

    def fill(layer: int) -> None:
        for panel, start in enumerate(range(0, outputs, width)):
            part = stacked[layer][:, start : start + width]
            values[layer, panel, :, : part.shape[1]] = part

    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock
        list(pool.map(fill, range(layers)))
    return Panels(values, outputs)
