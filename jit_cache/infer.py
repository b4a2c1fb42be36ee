"""What a servable returns, inferred: each output dim as an expression of the axes.

`jax.eval_shape` with symbolic sizes gives dims such as ``2*length - 1`` or ``floordiv(height + 1, 2)``;
evaluated at an item's real sizes they say where to cut the padding off. A function that looks at concrete
sizes cannot be evaluated so; it is probed at a few sizes instead.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from ..bucketing import Grid
from .dims import compile_dim, names_in
from .errors import SignatureError, call_remedy
from .outputs import Output, Outputs
from .signature import BATCH, Dim, Signature

Run = Callable[[Any, dict[str, Any]], Any]
_Dims = tuple[str | int | None, ...]
_Inferred = tuple[Any, list[_Dims]]
_DECLARATION = re.compile(r"\s*(?P<dtype>[a-z0-9_]+)\s*\[(?P<dims>[^\]]*)\]\s*", re.ASCII)
# Without a grid: sizes that are no multiples of one another, so that few functions refuse or confuse them.
_PROBES = ((2, 5), (16, 40), (24, 56), (32, 72), (48, 88))


def infer_outputs(
    run: Run,
    params: Any,
    signature: Signature,
    declared: Mapping[str, str] | None = None,
    grid: Grid | None = None,
) -> Outputs:
    """Infer the outputs by symbolic evaluation, by probing concrete sizes where that fails.

    Args:
        run: ``(params, inputs by name) -> tree``.
        params: tree of arrays or `jax.ShapeDtypeStruct`.
        signature: the inputs.
        declared: declarations ``name -> 'dtype[dims]'`` of outputs, which overrule what is inferred; dims
            are numbers, axis names or expressions such as ``2*length - 1``.
        grid: the buckets. Its limits bound the symbolic sizes, so that a table of 512 positions may be cut
            to the length of the input; and its sizes are those that are probed.

    Raises:
        SignatureError: if the function cannot be evaluated at all, an output has no leading batch dim, or
            its dims are ambiguous and undeclared, or declared in contradiction to what is returned.
    """
    tree, all_dims = _symbolic(run, params, signature, grid) or _probed(run, params, signature, grid)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = _names([path for path, _ in paths])
    declared = declared or {}
    if unknown := sorted(set(declared) - set(names)):
        raise SignatureError(f"outputs are {names}; declared but not returned: {unknown}: remove it")
    leaves = []
    for name, (_, leaf), dims in zip(names, paths, all_dims, strict=True):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise SignatureError(
                f"outputs are arrays of numbers; output {name!r} has {leaf.dtype}: leave it out"
            )
        if not dims or dims[0] != BATCH:
            raise SignatureError(
                f"every output has the batch as its first dim; output {name!r} has dims {list(dims)}: return "
                f"one row for each item, for example by broadcasting, or leave it out"
            )
        dtype = np.dtype(leaf.dtype)
        if name in declared:
            item_dims = _declared(name, declared[name], dtype, len(leaf.shape) - 1, signature.axes)
        else:
            item_dims = _item_dims(name, dims)
        leaves.append(Output(name, dtype, item_dims))
    return Outputs(tuple(leaves), treedef, signature.axes)


def _names(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Names for the wire: the path in the tree, ``output`` for a lone array, ``output_0`` in a tuple."""
    names = []
    for path in paths:
        keys = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
        name = ".".join(keys)
        names.append("output" if not path else f"output_{name}" if keys[0].isdigit() else name)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SignatureError(
            f"outputs have distinct names, their paths in the returned tree; {twice} come twice: rename a key"
        )
    return names


def _item_dims(name: str, dims: _Dims) -> tuple[Dim, ...]:
    known: list[Dim] = []
    for dim in dims[1:]:
        if dim is None or (isinstance(dim, str) and BATCH in names_in(dim)):
            shown = ["?" if one is None else one for one in dims]
            raise SignatureError(
                f"an output dim must follow from the axes of one item; output {name!r} has dims {shown}: "
                "declare its dtype and every dim, a number or an expression of axes, such as "
                f"outputs={{{name!r}: 'float32[(length + 1)//2, 64]'}}"
            )
        known.append(dim)
    return tuple(known)


def _declared(
    name: str, declaration: str, dtype: np.dtype[Any], rank: int, axes: tuple[str, ...]
) -> tuple[Dim, ...]:
    match = _DECLARATION.fullmatch(declaration)
    if match is None:
        raise SignatureError(
            f"an output is declared as 'dtype[dims]', dims being those of one item; output {name!r} is "
            f"{declaration!r}: write for example '{dtype}[length, 2*length - 1]'"
        )
    # Only commas outside parentheses separate dims: floordiv(length, 2) is one.
    parts = re.split(r",(?![^(]*\))", match["dims"]) if match["dims"].strip() else []
    dims = tuple(int(part) if part.strip().isdecimal() else part.strip() for part in parts)
    for dim in dims:
        if isinstance(dim, str):
            compile_dim(dim, axes)
    if match["dtype"] != dtype.name or len(dims) != rank:
        raise SignatureError(
            f"a declaration agrees with what the model returns; output {name!r} is {dtype} with {rank} dims "
            f"for one item, declared {declaration!r}: correct the declaration"
        )
    return dims


def _symbolic(run: Run, params: Any, signature: Signature, grid: Grid | None) -> _Inferred | None:
    names = (BATCH, *signature.axes)
    limits = grid.limits if grid is not None else {}
    constraints = [f"{name} <= {limits[name]}" for name in names if name in limits]
    try:
        symbols = export.symbolic_shape(", ".join(names), constraints=constraints)
        tree = jax.eval_shape(run, params, signature.abstract(dict(zip(names, symbols, strict=True))))
    except Exception:  # any failure here only means: not symbolically evaluable; probing decides
        return None
    leaves = jax.tree.leaves(tree)
    return tree, [tuple(dim if isinstance(dim, int) else str(dim) for dim in leaf.shape) for leaf in leaves]


def _probed(run: Run, params: Any, signature: Signature, grid: Grid | None) -> _Inferred:
    """Evaluate at a few concrete sizes; a dim is an axis if it moves with it, a number if it never moves."""
    names = (BATCH, *signature.axes)
    pairs = [_probe_sizes(index, name, grid) for index, name in enumerate(names)]
    base = {name: low for name, (low, _) in zip(names, pairs, strict=True)}
    one_by_one = [base, *({**base, name: high} for name, (_, high) in zip(names, pairs, strict=True))]
    try:
        return _probed_at(one_by_one, run, params, signature)
    except SignatureError:
        if grid is None:
            raise
    # Sizes of different buckets need not go together (square images only); those of one bucket must.
    ends = (grid.buckets[0], grid.buckets[-1])
    corners = [dict(zip(bucket.axes, bucket.sizes, strict=True)) for bucket in ends]
    return _probed_at(corners, run, params, signature)


def _probed_at(probes: list[dict[str, int]], run: Run, params: Any, signature: Signature) -> _Inferred:
    trees = [_probe(run, params, signature, probe) for probe in probes]
    if len({jax.tree.structure(tree) for tree in trees}) > 1:
        raise SignatureError(
            f"a model returns the same structure at every size; it differs among the sizes {probes}"
        )
    shapes = [[tuple(leaf.shape) for leaf in jax.tree.leaves(tree)] for tree in trees]
    return trees[0], [_probed_dims(one, probes) for one in zip(*shapes, strict=True)]


def _probe_sizes(index: int, name: str, grid: Grid | None) -> tuple[int, int]:
    if grid is None:
        return _PROBES[index % len(_PROBES)]
    rungs = grid.rungs(name)
    # An axis with a single size must move too, or it would look like a constant.
    return (rungs[0], rungs[-1]) if len(rungs) > 1 else (max(1, rungs[0] // 2), max(2, rungs[0]))


def _probe(run: Run, params: Any, signature: Signature, sizes: dict[str, int]) -> Any:
    try:
        return jax.eval_shape(run, params, signature.abstract(sizes))
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise SignatureError(
            f"the function must be traceable with its declared inputs; at {sizes} it failed with "
            f"{type(error).__name__}: {first_line}{call_remedy(error)}"
        ) from error


def _probed_dims(shapes: Sequence[tuple[int, ...]], probes: Sequence[dict[str, int]]) -> _Dims:
    if len({len(shape) for shape in shapes}) > 1:
        return (BATCH, None)
    found: list[str | int | None] = []
    for seen in zip(*shapes, strict=True):
        fits: list[str | int] = [name for name in probes[0] if tuple(one[name] for one in probes) == seen]
        if len(set(seen)) == 1:
            fits.append(seen[0])
        found.append(fits[0] if len(fits) == 1 else None)
    return tuple(found)
