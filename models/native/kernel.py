"""The kernel in this process: compiled, made known to XLA, tried, and called from JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from . import compiled, crew, header, matmul
from .element import FLOAT32, Element, brief
from .target import Tile, tile


def available() -> bool:
    """Whether programs made here may call `product`: it compiles, and a trial gives what it should."""
    with compiled.asking:
        return _available()


@functools.cache
def _available() -> bool:
    return compiled.usable("products in panels", _tried)


def _tried() -> bool:
    _register()
    rng = np.random.default_rng(0)
    rows, width = 2 * tile().rows + 1, tile().width
    x = rng.integers(-8, 9, (rows, 24)).astype(np.float32)
    panels = rng.integers(-8, 9, (2, 3, 24, width)).astype(np.float32)
    pairs = panels.reshape(2, 3, 12, 2, width).swapaxes(3, 4).astype(jnp.bfloat16)
    sizes: Any = {"features": 2 * width + 1, "live": rows - 1}
    run = jax.jit(lambda x, *kinds: [product(x, one, jnp.int32(1), **sizes) for one in kinds])
    found = [np.asarray(one) for one in run(x, panels, pairs)]
    wanted = np.concatenate([x @ panel for panel in panels[1]], axis=1)[:, : 2 * width + 1]
    wanted[-1] = 0
    return all((one == wanted).all() for one in found)


def product(
    x: jax.Array,
    panels: jax.Array,
    layer: jax.Array,
    *,
    features: int,
    live: jax.Array | None = None,
    element: Element | None = None,
) -> jax.Array:
    """`x` times one of several matrices.

    Args:
        x: float32 `(rows, in)`; rounded to bfloat16 beside panels of that.
        panels: float32 `(layers, panels, in, width)`, zeros in columns past the last; or bfloat16 `(layers,
            panels, ceil(in / 2), width, 2)`, pairs of features, with a zero in the last of an odd number.
        layer: int32 scalar, which one; clipped into them.
        features: columns of a matrix, `(panels - 1) * width + 1` to `panels * width`.
        live: int32 scalar, how many rows are multiplied; those behind them, which cost nothing, give zeros.
            None for all.
        element: how numbers are multiplied, of those that are registered; by default what is fastest here.

    Returns:
        float32 `(rows, features)`; a row's numbers depend on no other row.

    Raises:
        InputError: these sizes and types do not fit one another.
    """
    brief_ones = panels.dtype == jnp.bfloat16
    x, layer = x.astype(jnp.bfloat16 if brief_ones else jnp.float32), jnp.int32(layer)
    if brief_ones:
        element = element or brief(tile())
        if x.shape[1] % 2:
            x = jnp.pad(x, ((0, 0), (0, 1)))
    check(x, panels, features)
    shape = jax.ShapeDtypeStruct((x.shape[0], features), jnp.float32)
    kernel: Any = jax.ffi.ffi_call((element or FLOAT32).called(tile()), shape, vmap_method="sequential")
    call = functools.partial(kernel, **declared(x, panels, features))
    whole = compiled.with_reference(call, functools.partial(_reference, features))
    y: jax.Array = whole(x, panels, layer, alive(x, live))
    return y


def alive(x: jax.Array, live: jax.Array | None) -> jax.Array:
    """How many rows of `x` are multiplied, as the kernel takes it."""
    count: jax.Array = jnp.int32(x.shape[0] if live is None else live)
    return count


def check(x: jax.Array, panels: jax.Array, features: int) -> None:
    """Refuse what the kernel would read or write past its ends: it takes all sizes from its operands.

    Args:
        x: `(rows, in)`, padded to whole groups of features.
        panels: `(layers, panels, groups, width, group)`, or without the last axis where a group is one.
        features: columns of a matrix.

    Raises:
        InputError: these sizes and types do not fit one another.
    """
    layers, count, groups, width = panels.shape[:4]
    group = panels.shape[4] if panels.ndim == 5 else 1
    last = features - (count - 1) * width
    sized = x.shape[1] == groups * group and group * panels.dtype.itemsize == 4 and layers and groups
    if not (sized and width == tile().width and 0 < last <= width):
        raise InputError(
            f"x must be (rows, in) beside panels (layers, panels, in, {tile().width}) of {features} columns, "
            f"got {x.shape} and {panels.dtype}{panels.shape}: lay the matrix out with `in_panels`"
        )


def declared(x: jax.Array, panels: jax.Array, features: int) -> dict[str, np.int64]:
    """What the call computes and moves, for those who add it up: one matrix of all."""
    rows: Any = x.shape[0]
    if not isinstance(rows, int):  # a symbolic one has no value yet, and none of its programs runs
        return {}
    moved = x.nbytes + panels.nbytes // panels.shape[0] + 4 * rows * features
    return {"flops": np.int64(2 * rows * x.shape[1] * features), "bytes": np.int64(moved)}


def _reference(
    features: int, x: jax.Array, panels: jax.Array, layer: jax.Array, live: jax.Array
) -> jax.Array:
    matrix = panels[jnp.clip(layer, 0, panels.shape[0] - 1)]
    if matrix.ndim == 4:  # pairs of features
        matrix = jnp.moveaxis(matrix, 3, 2).reshape(matrix.shape[0], -1, matrix.shape[2])
    kinds: Any = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    y = jnp.einsum("ri,piw->rpw", x, matrix, **kinds)
    y = y.reshape(x.shape[0], -1)[:, :features]
    return jnp.where(jnp.arange(x.shape[0])[:, None] < live, y, 0.0)


@functools.cache
def _register() -> None:
    """Compile the kernels for this machine and tell XLA.

    Raises:
        KernelUnavailable: there is none for this processor, system or jaxlib.
    """
    for element in (FLOAT32, brief(tile())):
        register(element)


def register(element: Element) -> None:
    """Compile the kernel for one kind of number and tell XLA, once in a process.

    Raises:
        KernelUnavailable: there is none for this processor, system or jaxlib.
    """
    compiled.register(handler(tile(), element))  # the tile says so where llvmlite is absent


def handler(tile: Tile, element: Element) -> compiled.Handler:
    """The kernel for one kind of number and of machine.

    Raises:
        KernelUnavailable: there is none for this jaxlib.
    """
    shape, layout = element.fitted(tile), header.read()
    parts = [crew.source(layout, shape), matmul.source(layout, shape, element)]
    return compiled.Handler(element.called(shape), "product", parts, passes=False)
