"""Products of uint8 with int8 in panels: the kernel of `matmul` where the processor multiplies in fours.

x86 processors with AVX-512 VNNI do, which is also what `vnni` asks XLA for.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from . import compiled, kernel
from .element import FOURS
from .target import tile

_KINDS = ["uint8", "int8", "int32", "float32", "int32", "float32"]
GROUP = 4  # features that stand together


class Rows(NamedTuple):
    """Activations.

    Attributes:
        values: uint8 `(rows, in)`.
        zeros: int32 `(rows,)`: which value stands for 0.
        steps: float32 `(rows,)`: what 1 of a value stands for.
    """

    values: Any
    zeros: Any
    steps: Any


class Columns(NamedTuple):
    """Matrices of all layers; what belongs to columns past the last is zero.

    Attributes:
        values: int8 `(layers, panels, ceil(in / 4), width, 4)`, zero in features past the last too.
        sums: int32 `(layers, panels, width)`: each column's values added up.
        scales: float32 `(layers, panels, width)`: what 1 of a value stands for.
    """

    values: Any
    sums: Any
    scales: Any


def available() -> bool:
    """Whether programs made here may call `product`: it compiles, and a trial gives what it should."""
    with compiled.asking:
        return _available()


@functools.cache
def _available() -> bool:
    return compiled.usable("products of int8 in panels", lambda: tile().fours and _tried())


def _tried() -> bool:
    """With numbers as large as they may be among others."""
    kernel.register(FOURS)
    rng = np.random.default_rng(0)
    rows, width = 2 * tile().rows + 1, tile().width
    outputs = 2 * width + 1
    x = rng.integers(0, 256, (rows, 22), np.uint8)
    panels = rng.integers(-127, 128, (2, 3, 6, width, GROUP), np.int8)
    x[:3], panels[1, 0, :, :2] = 255, [[127], [-127]]
    zeros, sums = rng.integers(0, 256, rows, np.int32), rng.integers(-999, 999, (2, 3, width), np.int32)
    steps, scales = (rng.normal(size=size).astype(np.float32) for size in (rows, (2, 3, width)))
    run = jax.jit(lambda *args: product(Rows(*args[:3]), Columns(*args[3:6]), args[6], features=outputs))
    got = np.asarray(run(x, zeros, steps, panels, sums, scales, np.int32(1)))
    matrix = panels[1].astype(np.int32).swapaxes(2, 3).reshape(3, 6 * GROUP, width)[:, :22]
    exact = np.concatenate([x.astype(np.int32) @ panel for panel in matrix], axis=1)
    exact -= zeros[:, None] * sums[1].reshape(1, -1)
    wanted = exact.astype(np.float32) * steps[:, None] * scales[1].reshape(1, -1)
    return bool((got == wanted[:, :outputs]).all())


def product(
    x: Rows, matrices: Columns, layer: jax.Array, *, features: int, live: jax.Array | None = None
) -> jax.Array:
    """`x` times one of several matrices: `(x.values @ values - zeros * sums) * steps * scales`.

    Args:
        x: activations.
        matrices: of all layers.
        layer: int32 scalar, which one; clipped into them.
        features: columns of a matrix, `(panels - 1) * width + 1` to `panels * width`.
        live: int32 scalar, how many rows are multiplied, see `kernel.product`; None for all.

    Returns:
        float32 `(rows, features)`, rounded three times, as sums up to 65,000 features of input are exact.

    Raises:
        InputError: these sizes and types do not fit one another.
    """
    values = x.values
    if behind := -values.shape[1] % GROUP:
        values = jnp.pad(values, ((0, 0), (0, behind)))
    _check(values, x, matrices, features)
    shape = jax.ShapeDtypeStruct((values.shape[0], features), jnp.float32)
    call: Any = jax.ffi.ffi_call(FOURS.called(tile()), shape, vmap_method="sequential")
    scaling = x.zeros, x.steps, matrices.sums, matrices.scales
    declared = kernel.declared(values, matrices.values, features)
    numbers = jnp.int32(layer), kernel.alive(values, live)
    y: jax.Array = call(values, matrices.values, *numbers, *scaling, **declared)
    return y


def _check(values: jax.Array, x: Rows, matrices: Columns, features: int) -> None:
    """Refuse what the kernel would read past its ends."""
    kernel.check(values, matrices.values, features)
    layers, panels, _, width = matrices.values.shape[:4]
    of_rows, of_columns = (x.zeros, x.steps), (matrices.sums, matrices.scales)
    kinds = [one.dtype for one in (values, matrices.values, *of_rows, *of_columns)]
    sized = {one.shape for one in of_rows} == {(values.shape[0],)}
    sized = sized and {one.shape for one in of_columns} == {(layers, panels, width)}
    if not sized or kinds != _KINDS:
        raise InputError(
            f"values, zeros and steps of rows, sums and scales of columns must be {', '.join(_KINDS)}, one a "
            f"row and one a column of the panels {matrices.values.shape}, got {', '.join(map(str, kinds))} "
            f"{[one.shape for one in (*of_rows, *of_columns)]}: lay them out with `panels_int8`"
        )
