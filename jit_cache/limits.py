"""What sizes a servable admits, and the grid of buckets over them."""

from collections.abc import Mapping

from ..bucketing import Grid, Ladder, SchemeLike, as_scheme, powers_of_two
from .errors import SignatureError
from .signature import BATCH

DEFAULT_MAX_ROWS = 32


def admissible(axes: tuple[str, ...], given: Mapping[str, int], grid: Grid | None) -> dict[str, int]:
    """Largest size of each axis, ``batch`` first.

    Args:
        axes: the varying axes of the inputs.
        given: limits by axis.
        grid: whose sizes are the limits where none is given.

    Raises:
        SignatureError: if an axis has none, one is unknown, or below 1.
    """
    limits = {BATCH: DEFAULT_MAX_ROWS, **(grid.limits if grid is not None else {}), **given}
    if missing := [axis for axis in axes if axis not in limits]:
        raise SignatureError(
            f"every varying axis needs a limit; {missing} have none: pass limits={{{missing[0]!r}: ...}}"
        )
    if unknown := [axis for axis in limits if axis not in (BATCH, *axes)]:
        raise SignatureError(f"limits are for the axes {[BATCH, *axes]}; got {unknown}: remove it")
    for axis, limit in limits.items():
        if not hasattr(limit, "__index__") or isinstance(limit, bool) or limit < 1:
            raise SignatureError(f"a limit is a whole number from 1 up; axis {axis!r} has {limit!r}")
    return {axis: int(limits[axis]) for axis in (BATCH, *axes)}


def make_grid(
    axes: tuple[str, ...],
    limits: Mapping[str, int],
    scheme: SchemeLike | Mapping[str, SchemeLike] | None,
    max_elements: int | None,
) -> Grid:
    """The product of the axes' ladders; see `Servable` for the arguments.

    Raises:
        SignatureError: if a scheme is for an unknown axis.
        servax.bucketing.BucketingError: if a ladder or the grid cannot be built.
    """
    by_axis = dict(scheme) if isinstance(scheme, Mapping) else {}
    if unknown := [axis for axis in by_axis if axis not in (BATCH, *axes)]:
        raise SignatureError(f"schemes are for the axes {[BATCH, *axes]}; got {unknown}: remove it")
    common = None if isinstance(scheme, Mapping) else scheme
    ladders: dict[str, Ladder] = {}
    for axis in (BATCH, *axes):
        chosen = by_axis.get(axis, common if axis != BATCH else None)
        if chosen is None:
            chosen = powers_of_two(1 if axis == BATCH else 8)
        ladders[axis] = as_scheme(chosen).ladder(limits[axis])
    return Grid.product(ladders, max_elements=max_elements)
