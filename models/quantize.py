"""A decoder's weights in int8, turned first so that eight bits are enough.

The residual stream has a few features that are much larger than the others, and one scale a token then
leaves few steps for the rest. An orthogonal turn of the features spreads them (Ashkboos et al. 2024, QuaRot,
arXiv:2404.00456). Turns of the residual stream and of each head's values are multiplied into the weights that
write and read them, and cost nothing at run time; RMSNorm keeps its result under a turn once its scale has
moved into the weights behind it. What the last product of a layer reads is turned when it is computed.

One layer is turned and rounded at a time, and a few thousand words of a table, so that memory holds the given
parameters, what becomes of them, and little else.

Perplexity of SmolLM2-135M, relative to float32 (2,000 tokens of Wikipedia): 1.036 without turns, 1.005 with
them; weights alone in int8, 1.006 without and 1.002 with. Over a pool in float16, 1.008 (10,200 tokens).
"""

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from . import panels_int8, vnni
from .llama_config import LlamaConfig
from .native import integers
from .panels import Panels
from .quantized import LARGEST, MIDDLE, SMALLEST, Quantized

Array = np.ndarray[Any, Any]
Layer = dict[str, dict[str, Array]]
_BLOCK = 64  # features that `down` reads turned together
_WORDS = 4096  # of a table that are turned together
# Outputs for an input from which activations go first, see `_laid_out`.
_WIDE = 4


class Table(NamedTuple):
    """Rows `(words, features)` of the word table or the head, and `(features, features)` to turn them by."""

    rows: Array
    turn: Array


def quantize(config: LlamaConfig, params: Mapping[str, Any]) -> tuple[LlamaConfig, dict[str, Any]]:
    """The same decoder with int8 tables and kernels.

    Args:
        config: sizes and choices.
        params: float32 NumPy arrays, layers stacked, as `llama.init` gives them.

    Returns:
        The configuration, with word table and head apart, since one is turned and the other scaled too; and
        parameters whose matrices are `Quantized`.
    """
    turn = hadamard(block_of(config.intermediate_size))
    rooms = _rooms(params)
    kernels: dict[str, list[Quantized]] = {}
    others: dict[str, dict[str, list[Array]]] = {}
    with ThreadPoolExecutor(4) as pool:  # NumPy works outside the lock
        for at, layer in enumerate(turned(config, params)):
            made = {
                name: pool.submit(
                    _kernel, leaves.pop("kernel"), turn if name == "down" else None, rooms.get(name), at
                )
                for name, leaves in layer.items()
                if "kernel" in leaves
            }
            for name, leaves in layer.items():
                for leaf, array in leaves.items():
                    others.setdefault(name, {}).setdefault(leaf, []).append(array)
            for name, future in made.items():
                kernels.setdefault(name, []).append(future.result())
    layers: dict[str, dict[str, Any]] = {
        name: {leaf: np.stack(arrays) for leaf, arrays in leaves.items()} for name, leaves in others.items()
    }
    for name, each in kernels.items():
        layers.setdefault(name, {})["kernel"] = _joined(each, turn if name == "down" else None)
    word, head = (_table(one) for one in tables(config, params))
    norm = {"scale": np.ones_like(params["norm"]["scale"])}
    head = table_in_panels(head) if rooms else _laid_out(head)
    whole = {"word": word, "layers": layers, "norm": norm, "head": head}
    return replace(config, tied=False), whole


def turned(config: LlamaConfig, params: Mapping[str, Any]) -> Iterator[Layer]:
    """The layers one after another, with features turned and the scales of norms moved into the weights."""
    turn = orthogonal(config.hidden_size)
    for at in range(config.num_layers):
        layer = {
            name: {leaf: stacked[at] for leaf, stacked in leaves.items()}
            for name, leaves in params["layers"].items()
        }
        for norm, name in (("input_norm", "qkv"), ("output_norm", "gate_up")):
            scale = layer[norm]["scale"]
            layer[name]["kernel"] = (turn.T * scale) @ layer[name]["kernel"]
            layer[norm] = {"scale": np.ones_like(scale)}
        for name in ("attended", "down"):
            layer[name]["kernel"] = layer[name]["kernel"] @ turn
        _turn_values(config, layer)
        yield layer


def tables(config: LlamaConfig, params: Mapping[str, Any]) -> tuple[Table, Table]:
    """The word table and the head for turned layers; a tied one becomes two."""
    turn, scale = orthogonal(config.hidden_size), params["norm"]["scale"]
    head = params["word"] if config.tied else params["head"]
    return Table(params["word"], turn), Table(head, scale[:, None] * turn)


def _turn_values(config: LlamaConfig, layer: Layer) -> None:
    """Turn each head's values, where they are made and where they are read."""
    heads, size = config.num_kv_heads, config.head_size
    turn = orthogonal(size)
    for name, leaf in layer["qkv"].items():
        other, values = np.split(leaf, [-heads * size], axis=-1)
        values = (values.reshape(*values.shape[:-1], heads, size) @ turn).reshape(values.shape)
        layer["qkv"][name] = np.concatenate([other, values], axis=-1)
    read = layer["attended"]["kernel"]
    by_head = read.reshape(config.num_heads, size, -1)
    layer["attended"]["kernel"] = (turn.T @ by_head).reshape(read.shape)


def _rooms(params: Mapping[str, Any]) -> dict[str, Panels]:
    """Panels of zeros for all layers' kernels; none where there is no kernel for panels."""
    if not integers.available():
        return {}
    shapes = {name: leaves["kernel"].shape for name, leaves in params["layers"].items() if "kernel" in leaves}
    return {
        name: panels_int8.zeros(layers, outputs, features)
        for name, (layers, features, outputs) in shapes.items()
    }


def _kernel(kernel: Array, turn: Array | None, room: Panels | None, at: int) -> Quantized:
    """float32 `(in, out)` of one layer to eight bits, in the layer's place where there is room."""
    if turn is not None:
        kernel = (turn.T @ kernel.reshape(-1, len(turn), kernel.shape[1])).reshape(kernel.shape)
    one = Quantized(*rounded(np.ascontiguousarray(kernel.T)))
    return _laid_out(one) if room is None else _put(one, room, at)


def _put(one: Quantized, room: Panels, at: int) -> Quantized:
    """A matrix `(out, in)` in panels, as one of several."""
    panels_int8.fill(room, at, one.values)
    return one._replace(values=room, sums=one.values.sum(axis=1, dtype=np.int32))


def table_in_panels(table: Quantized) -> Quantized:
    """A table `(words, features)` in panels."""
    room = panels_int8.zeros(1, *table.values.shape)
    return _joined([_put(table, room, 0)], None)


def _joined(each: list[Quantized], turn: Array | None) -> Quantized:
    """The kernels of all layers."""
    values, scales, _, sums = map(tuple, zip(*each, strict=True))
    if isinstance(values[0], Panels):  # the same of each
        of_columns = [panels_int8.columns(values[0], one) for one in (scales, sums)]
        return Quantized(values[0], of_columns[0], turn, of_columns[1])
    return Quantized(values, scales, turn, None if sums[0] is None else sums)


def _table(table: Table) -> Quantized:
    """Some rows at a time."""
    values, scales = np.empty(table.rows.shape, np.int8), np.empty(len(table.rows), np.float32)
    for at in range(0, len(values), _WORDS):
        some = slice(at, at + _WORDS)
        values[some], scales[some] = rounded(table.rows[some] @ table.turn)
    return Quantized(values, scales)


def _laid_out(one: Quantized) -> Quantized:
    """Out of panels: as `vnni.dot` takes it, where that is available; the same numbers.

    Weights go first, as uint8, and are not rearranged at each call. With many outputs a product takes as
    long the other way round, its result is not transposed, and it is faster at many rows: a gate and up of
    SmolLM2 takes 63, 148, 298 µs at 8, 32, 96 rows with weights first and 82, 137, 243 with activations.
    """
    outputs, features = one.values.shape
    if not vnni.available() or not vnni.fits(outputs, features):
        return one
    if outputs < _WIDE * features:
        return one._replace(values=one.values.view(np.uint8) ^ np.uint8(MIDDLE))
    return one._replace(sums=MIDDLE * one.values.sum(axis=1, dtype=np.int32))


def rounded(rows: Array) -> tuple[Array, Array]:
    """int8 of float32 `(rows, features)`, and a scale a row, by half of which a value is off at most."""
    highest = np.maximum(np.abs(rows).max(axis=1), np.float32(SMALLEST))
    scales = highest / np.float32(LARGEST)
    steps = rows / scales[:, None]
    return np.rint(steps, out=steps).astype(np.int8), scales


@functools.cache
def orthogonal(size: int) -> Array:
    """A matrix drawn evenly from all orthogonal ones (Mezzadri 2006, arXiv:math-ph/0609050)."""
    q, r = np.linalg.qr(np.random.default_rng(0).standard_normal((size, size)))
    drawn: Array = (q * np.sign(np.diag(r))).astype(np.float32)
    return drawn


def hadamard(size: int) -> Array:
    """Sylvester's orthogonal matrix of ±1/√size; `size` is a power of two."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs / np.float32(size**0.5)


def block_of(size: int) -> int:
    """The largest power of two, at most `_BLOCK`, that divides `size`."""
    return min(_BLOCK, size & -size)
