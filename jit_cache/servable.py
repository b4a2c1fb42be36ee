"""A servable: a pure function, its parameters, what it takes and the grid of buckets it runs in."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ..bucketing import Grid, Ladder, Scheme, explicit, parse_scheme, powers_of_two
from .errors import SignatureError
from .outputs import Outputs, infer_outputs
from .signature import BATCH, Signature

DEFAULT_MAX_ROWS = 32
SchemeLike = Scheme | str | Sequence[int]


class Servable:
    """A pure JAX function that can be served at any size within its limits.

    Args:
        apply: ``apply(params, **inputs)``, or ``apply(**inputs)`` where ``params`` is None. Inputs arrive
            batched, ``(batch, *dims)``; every output leaf is ``(batch, ...)``. Pure: no state, no
            randomness of its own. Weights belong in ``params``; closed-over ones are refused when
            compiling, since each program would hold a copy.
        params: any pytree of arrays.
        inputs: declaration of each input by name, such as ``{"ids": "int32[length]", "mask":
            "mask[length]"}``; see `servax.jit_cache.signature` for the grammar.
        limits: largest size of each varying axis; ``batch`` is the most rows run at once (default 32).
        scheme: how each axis gets its sizes: one scheme for all item axes, or one by axis name (``batch``
            included). A scheme is an object, a string such as ``"powers_of_two:16"``, or a list of sizes.
            Default: powers of two, from 1 for the batch and from 8 for the others.
        max_elements: drop buckets whose product of sizes is larger (the one-row bucket always stays).
        grid: the buckets themselves, instead of ``scheme``.
        outputs: declarations ``name -> 'dtype[dims]'`` of outputs whose dims cannot be inferred.
        name: the model's name on the wire.
        version: the model's version on the wire.
        allow_nonfinite: whether NaN and infinity may pass in float inputs.

    Raises:
        SignatureError: if the declarations cannot be kept.
        servax.bucketing.BucketingError: if the scheme or the grid cannot be built or leaves a hole.
    """

    def __init__(
        self,
        apply: Callable[..., Any],
        params: Any = None,
        *,
        inputs: Mapping[str, str],
        limits: Mapping[str, int] | None = None,
        scheme: SchemeLike | Mapping[str, SchemeLike] | None = None,
        max_elements: int | None = None,
        grid: Grid | None = None,
        outputs: Mapping[str, str] | None = None,
        name: str = "model",
        version: str = "1",
        allow_nonfinite: bool = False,
    ) -> None:
        self.apply = apply
        self.name = name
        self.version = version
        self.allow_nonfinite = allow_nonfinite
        self.signature = Signature.parse(inputs)
        self._has_params = params is not None
        self.leaves, self._treedef = jax.tree.flatten(params)
        self._declared_outputs = outputs
        self.limits = _limits(self.signature.axes, limits or {}, grid)
        self.grid = (
            grid if grid is not None else _make_grid(self.signature.axes, self.limits, scheme, max_elements)
        )
        if self.grid.axes != (BATCH, *self.signature.axes):
            raise SignatureError(
                f"a grid has the axes of the inputs, {[BATCH, *self.signature.axes]}; got {list(self.grid.axes)}"
            )
        self.grid.check_coverage({axis: self.limits[axis] for axis in self.signature.axes})

    def __repr__(self) -> str:
        return f"Servable({self.name!r}, axes={list(self.signature.axes)}, buckets={len(self.grid.buckets)})"

    def run_flat(self, leaves: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Call ``apply`` with parameters given as flattened leaves; what gets traced."""
        if not self._has_params:
            return self.apply(**inputs)
        return self.apply(jax.tree.unflatten(self._treedef, leaves), **inputs)

    @cached_property
    def abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter leaf."""
        return [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in self.leaves]

    @cached_property
    def outputs(self) -> Outputs:
        """What the function returns; inferred at the first use, without compiling anything."""
        return infer_outputs(self.run_flat, self.abstract_leaves, self.signature, self._declared_outputs)


def from_nnx(module: Any, **options: Any) -> Servable:
    """Make a servable of a Flax NNX module.

    The module is split into its structure and its state; the state is the servable's parameters. It is
    served in evaluation mode (``module.eval()`` is called), and changes that a call makes to the state are
    dropped.

    Args:
        module: a `flax.nnx.Module` whose ``__call__`` takes the declared inputs as keywords.
        options: everything else that `Servable` takes.

    Raises:
        SignatureError: if it is no NNX module.
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise SignatureError(
            f"from_nnx takes a flax.nnx.Module; got {type(module).__name__}: pass any other function to "
            f"servax.Servable(apply, params, ...)"
        )
    module.eval()
    graphdef, state = nnx.split(module)

    def apply(params: Any, **inputs: Any) -> Any:
        return nnx.merge(graphdef, params)(**inputs)

    return Servable(apply, state, **options)


def _limits(axes: tuple[str, ...], given: Mapping[str, int], grid: Grid | None) -> dict[str, int]:
    limits = {BATCH: DEFAULT_MAX_ROWS, **(grid.limits if grid is not None else {}), **given}
    if missing := [axis for axis in axes if axis not in limits]:
        raise SignatureError(
            f"every varying axis needs a limit; {missing} have none: pass limits={{{missing[0]!r}: ...}}"
        )
    if unknown := [axis for axis in limits if axis not in (BATCH, *axes)]:
        raise SignatureError(f"limits are for the axes {[BATCH, *axes]}; got {unknown}: remove it")
    for axis, limit in limits.items():
        if not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 1:
            raise SignatureError(f"a limit is a whole number from 1 up; axis {axis!r} has {limit!r}")
    return {axis: int(limits[axis]) for axis in (BATCH, *axes)}


def _make_grid(
    axes: tuple[str, ...],
    limits: Mapping[str, int],
    scheme: SchemeLike | Mapping[str, SchemeLike] | None,
    max_elements: int | None,
) -> Grid:
    by_axis = dict(scheme) if isinstance(scheme, Mapping) else {}
    if unknown := [axis for axis in by_axis if axis not in (BATCH, *axes)]:
        raise SignatureError(f"schemes are for the axes {[BATCH, *axes]}; got {unknown}: remove it")
    common = None if isinstance(scheme, Mapping) else scheme
    ladders: dict[str, Ladder] = {}
    for axis in (BATCH, *axes):
        chosen = by_axis.get(axis, common if axis != BATCH else None)
        if chosen is None:
            chosen = powers_of_two(1 if axis == BATCH else 8)
        ladders[axis] = _scheme(chosen).ladder(limits[axis])
    return Grid.product(ladders, max_elements=max_elements)


def _scheme(chosen: SchemeLike) -> Scheme:
    if isinstance(chosen, str):
        return parse_scheme(chosen)
    return explicit(chosen) if isinstance(chosen, Sequence) else chosen
