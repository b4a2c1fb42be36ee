"""The packed layout: several items share a row, kept apart by segment ids.

Ragged batching with static shapes. A model that knows segments gives each item the answer it gets alone; what
padding it saves is in the experiments (`compare_schemes`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket, CostModel, Grid, Packing
from ..bucketing.packed_plan import PackedPlanner, pack_all
from .errors import InputError, OutputError, SignatureError
from .outputs import Output, Outputs, same_structure
from .servable import Servable
from .signature import BATCH, Input, Signature
from .staging import Staging

SEGMENTS, POSITIONS = "segment_ids", "positions"


class PackedServable(Servable):
    """A servable whose buckets hold packed rows.

    Args:
        padded: the same model in the padded layout: its inputs, limits, grid and outputs are taken over.
            It has one varying axis, which is the first dim of every input and output that has it.
        apply: ``apply(params, *, segment_ids, positions, **inputs)``. Both are int32 ``(batch, length)``:
            segments count from 1 in each row, 0 on padding; positions from 0 in each segment. Inputs with the
            axis are ``(batch, length, *dims)``, others ``(batch, max_segments, *dims)``. Outputs likewise:
            ``(batch, length, ...)`` where the padded model gives one entry an element, else
            ``(batch, max_segments, ...)``.
        max_segments: most items in one row.

    Raises:
        SignatureError: if the model has not exactly one varying axis, an input or output has it elsewhere
            than first, it has variants or switched sizes, or `max_segments` is below 1.
    """

    def __init__(self, padded: Servable, apply: Callable[..., Any], *, max_segments: int = 16) -> None:
        # Its outputs are another class, inferred when they are first asked for.
        self.__dict__.update({name: one for name, one in padded.__dict__.items() if name != "outputs"})
        self.padded, self.max_segments, self._packed_apply = padded, max_segments, apply
        self.layout = "packed"
        self._check()

    def _check(self) -> None:
        axes = self.signature.axes
        if len(axes) != 1 or self.max_segments < 1:
            raise SignatureError(
                f"packing needs one varying axis and at least 1 segment a row; model {self.name!r} has the "
                f"axes {list(axes)} and max_segments={self.max_segments}: serve it padded"
            )
        if len(self.variants) > 1 or self.variants[0] != "static":
            raise SignatureError(
                f"a packed model has one static program a bucket; model {self.name!r} has the variants "
                f"{list(self.variants)}: leave them out"
            )
        for one in self.signature.inputs:
            _along(one.name, one.dims, axes[0])

    @property
    def code(self) -> tuple[Any, ...]:
        """What decides its programs, beside shapes."""
        return (PackedServable.run_flat, self.apply, self._packed_apply, self.max_segments)

    @property
    def most_items(self) -> int:
        """Most items that one batch takes: several in each row."""
        return self.limits[BATCH] * self.max_segments

    def run_flat(self, leaves: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Call the packed function with parameters given as flattened leaves; what gets traced."""
        if not self._has_params:
            return self._packed_apply(**inputs)
        return self._packed_apply(jax.tree.unflatten(self._treedef, leaves), **inputs)

    def place(self) -> Sequence[jax.Array]:
        """See `Servable.place`; the padded form takes the same arrays, or it would keep the host's copies."""
        placed = super().place()
        self.padded.leaves = self.leaves
        return placed

    @cached_property
    def outputs(self) -> Outputs:
        """What one item gets; the padded model's.

        Raises:
            SignatureError: if an output has the axis elsewhere than first.
        """
        base = self.padded.outputs
        for leaf in base.leaves:
            _along(leaf.name, leaf.dims, self.signature.axes[0])
        return PackedOutputs(base.leaves, base.treedef, base.axes, self.max_segments)

    def program_inputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of what a program takes."""
        shapes = _shapes(self.signature, bucket, self.max_segments)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}

    def staging(self, bucket: Bucket) -> "PackedStaging":
        """Host buffers of one batch."""
        return PackedStaging(self.signature, bucket, self.max_segments)

    def planner(self, grid: Grid, cost: CostModel, window: int) -> PackedPlanner:
        """What chooses its batches."""
        return PackedPlanner(grid, cost, window, max_segments=self.max_segments)


@dataclass(frozen=True)
class PackedOutputs(Outputs):
    """Outputs of packed rows; see `Outputs`."""

    max_segments: int = field(default=1)

    def cut_packed(self, arrays: Sequence[np.ndarray], packing: Packing) -> list[list[np.ndarray]]:
        """The own arrays of each packed item, in the order in which they were packed."""
        rows: list[list[np.ndarray]] = [[] for _ in range(len(packing))]
        for leaf, array in zip(self.leaves, arrays, strict=True):
            if leaf.fixed:
                pieces: Sequence[np.ndarray] = list(packing.gather_pooled(array))
            else:
                pieces = [one.copy() for one in packing.gather(array)]
            for out, piece in zip(rows, pieces, strict=True):
                out.append(np.asarray(piece))
        return rows

    def check_program(self, shapes: Sequence[Any], treedef: Any, rows: int, sizes: Sequence[int]) -> None:
        """Check what one program returns, before it is ever run; raises OutputError."""
        if not same_structure(treedef, self.treedef):
            raise OutputError(
                f"a packed model returns what the padded one does; expected {self.treedef}, got {treedef}"
            )
        for leaf, given in zip(self.leaves, shapes, strict=True):
            inner = leaf.dims if leaf.fixed else leaf.dims[1:]
            wanted = (rows, self.max_segments if leaf.fixed else sizes[0], *inner)
            if tuple(given.shape) != wanted or given.dtype != leaf.dtype:
                raise OutputError(
                    f"output {leaf.name!r} of a packed model: expected {leaf.dtype}{list(wanted)}, got "
                    f"{given.dtype}{list(given.shape)}: one entry a segment, or one an element"
                )


class PackedStaging(Staging):
    """Packed inputs of one bucket; see `Staging`."""

    def __init__(self, signature: Signature, bucket: Bucket, max_segments: int) -> None:
        self._signature, self._bucket, self._max_segments = signature, bucket, max_segments
        shapes = _shapes(signature, bucket, max_segments)
        self.arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        self._packing: Packing | None = None
        self._counted = np.arange(bucket.item_sizes[0], dtype=np.int32)

    def fill(
        self, items: Sequence[Mapping[str, np.ndarray]], sizes: Sequence[Sequence[int]]
    ) -> dict[str, np.ndarray]:
        """Pack the items of a batch and pad the rest; see `Staging.fill`.

        Raises:
            InputError: if they do not all get into the bucket.
        """
        lengths = [size[0] for size in sizes]
        if len(lengths) == 1 and lengths[0] <= len(self._counted):
            self._fill_alone(items[0], lengths[0])
            return self.arrays
        packing = pack_all(lengths, self._bucket, self._max_segments)
        if packing is None:
            raise InputError(
                f"the items of a batch are packed into its bucket; {len(items)} of {sum(lengths)} elements "
                f"do not get into {self._bucket}: run fewer together"
            )
        self._packing = packing
        for one in self._signature.inputs:
            out, values = self.arrays[one.name], [item[one.name] for item in items]
            if one.dims and isinstance(one.dims[0], str):
                packing.fill(out, values, one.pad)
            else:
                out[...] = one.pad
                if values:
                    out[packing.row, packing.segment - 1] = np.stack(values)
        packing.fill_segments(self.arrays[SEGMENTS])
        packing.fill_positions(self.arrays[POSITIONS])
        return self.arrays

    def _fill_alone(self, item: Mapping[str, np.ndarray], length: int) -> None:
        """One item at the begin of the first row: at low load every item, and a fifth of the usual time."""
        self._packing = None
        for one in self._signature.inputs:
            out = self.arrays[one.name]
            out[...] = one.pad
            if one.dims and isinstance(one.dims[0], str):
                out[0, :length] = item[one.name]
            else:
                out[0, 0] = item[one.name]
        segments, positions = self.arrays[SEGMENTS], self.arrays[POSITIONS]
        segments[...] = positions[...] = 0
        segments[0, :length] = 1
        positions[0, :length] = self._counted[:length]

    def cut(
        self, outputs: Outputs, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]
    ) -> list[list[np.ndarray]]:
        """The outputs of the batch that was filled in last, cut to its items."""
        if isinstance(outputs, PackedOutputs) and self._packing is not None:
            return outputs.cut_packed(arrays, self._packing)
        if not isinstance(outputs, PackedOutputs) or len(sizes) != 1:
            raise OutputError("packed rows are cut after they were filled; these were not: fill them first")
        ((length,),) = sizes
        pairs = zip(outputs.leaves, arrays, strict=True)
        return [[np.array(one[0, 0] if leaf.fixed else one[0, :length]) for leaf, one in pairs]]


def _along(name: str, dims: Sequence[int | str], axis: str) -> bool:
    """Whether an array varies along the axis, which must be its first dim then."""
    varying = [place for place, dim in enumerate(dims) if isinstance(dim, str)]
    if varying and (varying != [0] or dims[0] != axis):
        raise SignatureError(
            f"packed arrays vary in their first dim only, along {axis!r}; {name!r} has dims {list(dims)}: "
            f"serve the model padded"
        )
    return bool(varying)


def _shapes(
    signature: Signature, bucket: Bucket, max_segments: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    rows, columns = bucket.sizes

    def shape(one: Input | Output) -> tuple[int, ...]:
        varies = _along(one.name, one.dims, signature.axes[0])
        inner = one.dims[1:] if varies else one.dims
        return (rows, columns if varies else max_segments, *(dim for dim in inner if isinstance(dim, int)))

    int32 = np.dtype(np.int32)
    return {
        **{one.name: (shape(one), one.dtype) for one in signature.inputs},
        SEGMENTS: ((rows, columns), int32),
        POSITIONS: ((rows, columns), int32),
    }
