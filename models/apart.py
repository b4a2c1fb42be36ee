"""Kernels of scanned layers as arrays of their own.

XLA:CPU copies a scanned layer's part of a stacked kernel before it multiplies by it. With each kernel an
array of its own, chosen by a switch inside the scan, it does not, and compiles as fast as a plain scan, in a
third to a half of the time of unrolled layers. A step of SmolLM2 takes 32, 50 and 95 ms of the processor at
1, 8 and 32 rows with stacked kernels and 23, 45 and 91 with kernels apart; MiniLM runs 1.2 times as fast at
1x32 and 1.04 times at 2x256.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from . import offset, panels, quantized, turned
from .offset import Offset
from .panels import Panels
from .quantized import Quantized
from .turned import Turned

Kernels = tuple[jax.Array, ...] | Quantized | Offset | Turned | Panels
Apart = Mapping[str, Kernels]
"""Kernels of each layer by the name of the linear map, and int8 tables; empty if all are in the module."""

# TF32 and bfloat16 passes, the defaults of GPUs and TPUs for float32, miss the reference by 1e-3.
PRECISION = jax.lax.Precision.HIGHEST


def apart(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with each layer's kernels as arrays of their own.

    Args:
        params: with ``layers``, whose leaves are stacked on axis 0; NumPy arrays are not copied.
    """

    def split(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(leaf) if name == "kernel" else leaf for name, leaf in leaves.items()}

    return {**params, "layers": {name: split(leaves) for name, leaves in params["layers"].items()}}


def joined(params: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], Apart]:
    """The parameters as a module takes them, with empty kernels where they are apart, and those.

    Args:
        params: stacked, or as `apart` gives them.
        layers: how many there are.
    """
    here: dict[str, Any] = {}
    there: dict[str, Kernels] = {}
    for name, leaves in params["layers"].items():
        kernel = leaves.get("kernel")
        here[name] = dict(leaves)
        if isinstance(kernel, tuple | Panels):
            here[name]["kernel"], there[name] = jnp.zeros((layers, 0)), kernel
    tables = {name: leaf for name, leaf in params.items() if isinstance(leaf, Quantized | Panels)}
    return {**params, "layers": here, **dict.fromkeys(tables, jnp.zeros((0, 0)))}, there | tables


def product(kernels: Kernels, layer: jax.Array, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """`x` times the kernel of a layer.

    Args:
        kernels: `(in, out)` of each layer, in panels, turned (float32 or bfloat16), or in int8.
        layer: int32 scalar, which one.
        x: float32 `(..., in)`, for `Quantized` `(rows, in)`.
        live: int32 scalar, how many rows are needed; those behind them give something finite. None for all.

    Returns:
        float32 `(..., out)`.
    """
    if isinstance(kernels, Panels):
        return panels.product(kernels, layer, x, live)
    if isinstance(kernels, Quantized):
        return quantized.product(kernels, layer, x, live)
    if isinstance(kernels, Turned):
        return turned.product(kernels, layer, x)
    if isinstance(kernels, Offset):
        return offset.product(kernels, layer, x, live)
    y: jax.Array = jax.lax.switch(layer, [functools.partial(_times, one) for one in kernels], x)
    return y


def _times(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel, precision=PRECISION)
