"""Host buffers that a batch is padded into; one set for each bucket and batch in flight.

Steady state allocates nothing: a set is made when its program becomes ready and reused for every batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..bucketing import Bucket, fill_lengths, fill_mask, pad_rows
from .signature import Made, Signature


class Staging:
    """Padded inputs of one bucket.

    Not thread-safe: it belongs to the thread that launches. The arrays must not be filled again before the
    program that reads them has finished, since a CPU device reads them in place.
    """

    def __init__(self, signature: Signature, bucket: Bucket) -> None:
        self._signature = signature
        sizes = dict(zip(bucket.axes, bucket.sizes, strict=True))
        self._axis_index = {axis: index for index, axis in enumerate(signature.axes)}
        self.arrays: dict[str, np.ndarray] = {}
        for one in signature.everything:
            shape = signature.shape_of(one, sizes)
            self.arrays[one.name] = np.zeros(shape, one.dtype)
            if isinstance(one, Made) and one.kind == "positions":
                self.arrays[one.name][...] = np.arange(shape[1], dtype=np.int32)

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
