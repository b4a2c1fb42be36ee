"""Matrices in panels, for products by the kernel of `native`: float32 or bfloat16, on CPUs.

XLA:CPU rearranges a matrix at each product; here it is rearranged once. The products of MiniLM's layers take
1.1, 2.5 and 21.4 ms of two cores at 16, 48 and 512 tokens (XLA: 1.7, 3.3, 23.2), those of SmolLM2's layers
8.5, 9.8 and 18.3 ms at 1, 8 and 32 rows (XLA with matrices as `(out, in)`: 9.2, 15.1, 24.8).

**bfloat16** takes half the bytes, and half the time where there is an instruction for products of pairs:
MiniLM's 1.0, 2.2 and 13.1 ms at those sizes and SmolLM2's 4.1, 6.0 and 12.2 (XLA with matrices as `(out,
in)`: 1.8, 3.0, 15.3 and 10.0, 12.3, 19.8), with the same numbers as XLA to the bit. Widened to float32 in
registers, as elsewhere, SmolLM2's take 5.1, 8.2 and 19.1 ms: the bytes are half of float32's, the arithmetic
is not.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import native
from .errors import InputError

Array = np.ndarray[Any, Any]
_TABLES = ("word", "head")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("features", "padding")
)
@dataclasses.dataclass(frozen=True)
class Panels:
    """The kernels of all layers, or a table of words.

    Attributes:
        values: float32 `(layers, panels, in, width)`, or bfloat16 `(layers, panels, ceil(in / 2), width, 2)`
            with pairs of features; of a table, whose words are outputs, one layer.
        features: outputs, of which the last panel may hold fewer than `width`.
        padding: features of zeros behind the last, 1 where bfloat16 pairs an odd number.
    """

    values: Any
    features: int
    padding: int = 0


def panels(params: Mapping[str, Any], *, tables: bool, dtype: Any = np.float32) -> dict[str, Any]:
    """The same parameters with each layer's kernels in panels; other leaves as they are.

    Args:
        params: float32 NumPy arrays, layers stacked on axis 0, kernels `(layers, in, out)`; not changed.
        tables: whether tables `word` and `head`, `(words, in)`, are put in panels too: those that are
            multiplied by.
        dtype: of kernels and tables, float32 or bfloat16.
    """
    width = native.tile().width
    names = _multiplied(params) if tables else ()

    def table(name: str, leaf: Any) -> Any:
        if name in names:
            return _packed(np.swapaxes(leaf, 0, 1)[None], width, dtype)
        return leaf.astype(dtype) if name in _TABLES and dtype != np.float32 else leaf

    def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: _packed(leaf, width, dtype) if name == "kernel" else leaf for name, leaf in leaves.items()
        }

    out = {name: table(name, leaf) for name, leaf in params.items()}
    out["layers"] = {name: split(leaves) for name, leaves in params["layers"].items()}
    return out


def matrices(kernels: Panels) -> Array:
    """The way back, for programs that take their weights elsewhere: `(layers, in, out)` of the same type."""
    values = np.asarray(kernels.values)
    layers, panels, inside, width = values.shape[:4]
    groups = values.reshape(layers, panels, inside, width, -1)
    plain = groups.transpose(0, 2, 4, 1, 3).reshape(layers, -1, panels * width)
    return plain[:, : plain.shape[1] - kernels.padding, : kernels.features]


def in_panels(kernel: Any, dtype: Any = np.float32) -> Any:
    """A matrix for `matmul`, laid out once as this machine multiplies fastest: for functions of your own.

    Args:
        kernel: `(in, out)`, of numbers.
        dtype: float32, or bfloat16 for half the bytes; activations are then rounded too.

    Returns:
        `Panels` where `native` has a kernel, else a NumPy array `(in, out)` of that type.

    Raises:
        InputError: it is no matrix, or of another type.
    """
    matrix, kind = np.asarray(kernel, np.float32), np.dtype(dtype)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InputError(f"a kernel must be (in, out), neither of them 0, got {matrix.shape}: reshape it")
    if kind not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise InputError(f"dtype must be float32 or bfloat16, got {kind}: choose one of them")
    return _packed(matrix[None], native.tile().width, kind) if native.available() else matrix.astype(kind)


def matmul(x: jax.Array, kernel: Any, live: jax.Array | None = None) -> jax.Array:
    """Activations times a matrix of `in_panels`.

    Args:
        x: `(..., in)`, of numbers.
        kernel: what `in_panels` gave.
        live: int32 scalar, how many of all rows are needed, such as `Ragged.live`. Those behind them give
            zeros, and cost nothing where `native` has a kernel. None for all.

    Returns:
        float32 `(..., out)`.

    Raises:
        InputError: `x` has another number of features.
    """
    inside = _inside(kernel)
    if x.shape[-1] != inside:
        raise InputError(
            f"x must have {inside} features as the kernel has, got {x.shape}: check its last axis"
        )
    if isinstance(kernel, Panels):
        return product(kernel, jnp.int32(0), x.astype(jnp.float32), live)
    kinds: Any = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    y: jax.Array = jnp.matmul(x.astype(kernel.dtype), kernel, **kinds)
    if live is None:
        return y
    rows = jnp.arange(math.prod(x.shape[:-1]), dtype=jnp.int32).reshape(*x.shape[:-1], 1)
    return jnp.where(rows < live, y, 0.0)


def _inside(kernel: Any) -> int:
    if not isinstance(kernel, Panels):
        return int(kernel.shape[0])
    features = kernel.values.shape[2] * (kernel.values.shape[4] if kernel.values.ndim == 5 else 1)
    return int(features - kernel.padding)


def product(kernels: Panels, layer: jax.Array, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: of all layers.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`.
        live: int32 scalar, how many rows are multiplied; those behind them give zeros. None for all.

    Returns:
        float32 `(..., out)`; a row's numbers depend on no other row.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = native.product(flat, kernels.values, layer, features=kernels.features, live=live)
    return y.reshape(*x.shape[:-1], kernels.features)


def scores(table: Panels, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """Products with each word of a table, float32 `(..., in)` to `(..., words)`; see `product`."""
    return product(table, jnp.int32(0), x, live)


def rows(table: Panels, ids: jax.Array) -> jax.Array:
    """Words of a table, float32 `(count, in)`; `ids` int32 `(count,)`, those outside are clipped into it."""
    width = table.values.shape[3]
    ids = jnp.clip(ids, 0, table.features - 1)
    found: jax.Array = table.values[0][ids // width, :, ids % width].reshape(ids.shape[0], -1)
    return found[:, : found.shape[1] - table.padding].astype(jnp.float32)


def _multiplied(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The table that gives the scores: the words' own where there is no other."""
    return ("head",) if "head" in params else ("word",)


def _packed(stacked: Array, width: int, dtype: Any) -> Panels:
    """Matrices `(layers, in, out)` in panels."""
    layers, features, outputs = stacked.shape
    group = 4 // np.dtype(dtype).itemsize  # features that stand together
    panels = -(-outputs // width)
    values = np.zeros((layers, panels, -(-features // group), width, group), dtype)

    def fill(at: tuple[int, int]) -> None:
        layer, panel = at
        part = stacked[layer, :, panel * width : (panel + 1) * width]
        for place in range(group):
            some = part[place::group]
            values[layer, panel, : len(some), : part.shape[1], place] = some

    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock
        list(pool.map(fill, itertools.product(range(layers), range(panels))))
    return Panels(values[..., 0] if group == 1 else values, outputs, padding=features % group)
