"""Does a neighbour in the row change an answer? Asked of a packed model before it is served."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..bucketing import Bucket
from .errors import UnsafePaddingError
from .packed import PackedServable
from .program import Program
from .safety_cases import Bench, Item
from .safety_compare import compare, usual_tolerance

_OTHER = 7


def require_packed_safe(
    servable: PackedServable,
    padded_fn: Callable[[Bucket], Program],
    packed_fn: Callable[[Bucket], Program],
    *,
    items: Sequence[Item] = (),
    ids_below: Mapping[str, int] | None = None,
    controls: Sequence[str] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    **_: Any,
) -> None:
    """Compare items that share a row with the same items alone, and with other neighbours.

    Args:
        servable: what to check; its padded form counts as right.
        padded_fn: makes a program of the padded form; one bucket.
        packed_fn: makes a program of the packed one; one bucket.
        items: see `servax.jit_cache.safety.check_padding`, as all that follow.
        ids_below: see there.
        controls: see there.
        seed: see there.
        tolerance: see there; between packed and padded. Between neighbours every value must be equal, but
            on several devices.

    Raises:
        UnsafePaddingError: naming the output that moved and by how much.
    """
    if tolerance is None:
        tolerance = usual_tolerance(servable.padded.abstract_leaves)
    bench = Bench(servable.padded, padded_fn, items, dict(ids_below or {}), controls, seed)
    bucket = min(servable.grid.buckets, key=lambda one: (one.item_sizes[0] < 3, one.elements))
    columns = bucket.item_sizes[0]
    lengths = [size for size in (columns - columns // 2, columns // 3, columns // 2 - columns // 3) if size]
    lengths = lengths[: servable.max_segments]
    trio = [bench.item(number, (length,)) for number, length in enumerate(lengths)]
    program = packed_fn(bucket)
    together = _run(servable, program, bucket, trio)
    names = [leaf.name for leaf in servable.outputs.leaves]
    for number, (item, got) in enumerate(zip(trio, together, strict=True)):
        alone = bench.run(servable.padded.grid.smallest(1, (lengths[number],)), [item]).rows[0]
        moved = compare(got, alone, tolerance)
        if moved is not None and moved.outside:
            raise UnsafePaddingError(
                f"model {servable.name!r}: an item in a packed row gets the answer it gets alone; output "
                f"{names[moved.leaf]!r} of item {number} moved by {moved.difference:.3g} (allowed "
                f"{moved.allowed:.3g}) in bucket {bucket}: limit attention and sums to equal segment_ids, "
                f"take positions from the input, or serve it padded"
            )
    if len(trio) < 2:
        return
    # A sum over devices may begin at another one for another place.
    same_bucket = tolerance if len(servable.devices or ()) > 1 else None
    changed = [trio[0], bench.item(_OTHER, (lengths[1],)), *trio[2:]]
    again = _run(servable, program, bucket, changed)
    for number in (place for place in range(len(trio)) if place != 1):
        moved = compare(again[number], together[number], same_bucket)
        if moved is not None and moved.outside:
            raise UnsafePaddingError(
                f"model {servable.name!r}: a neighbour in the row changes nothing; output "
                f"{names[moved.leaf]!r} of item {number} moved by {moved.difference:.3g} when item 1 became "
                f"another in bucket {bucket}: limit attention and sums to equal segment_ids, or "
                f"serve it padded"
            )


def _run(
    servable: PackedServable, program: Program, bucket: Bucket, items: Sequence[Item]
) -> list[list[np.ndarray]]:
    sizes = [servable.signature.item_sizes(item) for item in items]
    staging = servable.staging(bucket)
    whole = [np.array(leaf) for leaf in program(staging.fill(items, sizes))]
    return staging.cut(servable.outputs, whole, sizes)
