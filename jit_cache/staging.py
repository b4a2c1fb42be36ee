"""Host buffers that a batch is padded into; one set for each bucket and batch in flight.

Steady state allocates nothing: a set is made when its program becomes ready and reused for every batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..bucketing import Bucket, fill_lengths, fill_mask, pad_rows
from .outputs import Outputs
from .signature import Signature


class Sample(NamedTuple):
    """An item of a batch.

    Attributes:
        item: arrays by input name.
        sizes: its sizes, in the order of the signature's axes.
    """

    item: Mapping[str, np.ndarray]
    sizes: tuple[int, ...]


def full_batch(signature: Signature, bucket: Bucket) -> list[Sample]:
    """Items that fill a bucket to its last place, for timing it.

    They hold what stands on padding, but ones where integers are 0 there, which may be a mask. A batch of
    padding only is no measure: a program may leave out what is padded.

    Args:
        signature: what the inputs are.
        bucket: at which sizes.

    Returns:
        As many items as the bucket has rows, all the same arrays, of the bucket's sizes.
    """
    sizes = dict(zip(bucket.axes, bucket.sizes, strict=True))
    item = {}
    for one in signature.inputs:
        value = 1 if one.dtype.kind in "biu" and not one.pad else one.pad
        item[one.name] = np.full(signature.shape_of(one, sizes)[1:], value, one.dtype)
    return [Sample(item, bucket.item_sizes)] * bucket.rows


class Staging:
    """Padded inputs of one bucket.

    Not thread-safe: it belongs to the thread that launches. The arrays must not be filled again before the
    program that reads them has finished, since a CPU device reads them in place.

    Args:
        signature: what the inputs are.
        bucket: at which sizes.
        arrays: buffers of those shapes to write into; made here if None.
    """

    def __init__(
        self, signature: Signature, bucket: Bucket, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self._signature = signature
        self._axis_index = {axis: index for index, axis in enumerate(signature.axes)}
        if arrays is None:
            arrays = {
                name: np.zeros(one.shape, one.dtype) for name, one in signature.abstract_at(bucket).items()
            }
        self.arrays: dict[str, np.ndarray] = dict(arrays)
        self.lay_positions()

    def lay_positions(self) -> None:
        """Write what depends on the bucket alone; again only if others write into the same buffers."""
        for made in self._signature.made:
            if made.kind == "positions":
                self.arrays[made.name][...] = np.arange(self.arrays[made.name].shape[1], dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of the set."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(
        self, items: Sequence[Mapping[str, np.ndarray]], sizes: Sequence[Sequence[int]]
    ) -> dict[str, np.ndarray]:
        """Write the items of a batch and pad the rest.

        Args:
            items: checked items; at most as many as the bucket has rows, none for a batch of padding only.
            sizes: the items' sizes, in the order of the signature's axes.

        Returns:
            The buffers by input name, ``(batch, *padded dims)``; the same arrays at every call.
        """
        for one in self._signature.inputs:
            pad_rows(self.arrays[one.name], [item[one.name] for item in items], one.pad)
        if self._signature.made:
            table = np.asarray(sizes, np.int32).reshape(len(items), len(self._signature.axes))
            for made in self._signature.made:
                columns = table[:, [self._axis_index[axis] for axis in made.dims]]
                if made.kind == "mask":
                    fill_mask(self.arrays[made.name], columns)
                elif made.kind == "lengths":
                    fill_lengths(self.arrays[made.name], columns[:, 0])
        return self.arrays

    def cut(
        self, outputs: Outputs, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]
    ) -> list[list[np.ndarray]]:
        """The outputs of the batch that was filled in last, cut to its items; see `Outputs.cut`."""
        return outputs.cut(arrays, sizes)
