"""What a servable returns, inferred: each output dim as an expression of the axes.

`jax.eval_shape` with symbolic sizes gives dims such as ``2*length - 1`` or
``floordiv(height + 1, 2)``; evaluated at an item's real sizes they say where to cut the padding off.
The expressions are read back from their printed form, which is the documented grammar of
`jax.export.symbolic_shape`, so no private API of JAX is needed.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export

from .errors import OutputError, SignatureError
from .signature import BATCH, Dim, Signature, parse_input

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitXor: operator.pow,  # symbolic_shape writes a power as a^2
}
_CALLS: dict[str, Callable[..., int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def evaluate_dim(expression: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a printed dim expression at concrete sizes.

    Raises:
        SignatureError: if the expression is outside the grammar of symbolic dims.
    """

    def walk(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](walk(left), walk(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
                return _CALLS[name](*map(walk, args))
        raise SignatureError(
            f"an output dim is an expression of the axes {sorted(sizes)}; got {expression!r}: declare the "
            f"outputs of the servable by hand"
        )

    return walk(ast.parse(expression, mode="eval").body)


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what the model returns.

    Attributes:
        name: its path in the returned tree, as the wire protocols show it.
        dtype: NumPy dtype.
        dims: dims of one item (no batch): numbers, axis names or expressions of axis names.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Dims of one item; a ``str`` varies with the item's size."""
        return self.dims

    @property
    def fixed(self) -> bool:
        """Whether every item has the same shape, so that rows need no cutting."""
        return all(isinstance(dim, int) for dim in self.dims)


@dataclass(frozen=True)
class Outputs:
    """All outputs of a servable.

    Attributes:
        leaves: in the order of the flattened tree.
        treedef: structure that the model returns.
        axes: varying axes of the inputs, in the order of item sizes.
    """

    leaves: tuple[Output, ...]
    treedef: Any
    axes: tuple[str, ...]

    def item_shape(self, leaf: Output, sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of one item's output at the item's sizes."""
        by_name = dict(zip(self.axes, sizes, strict=True))
        return tuple(dim if isinstance(dim, int) else evaluate_dim(dim, by_name) for dim in leaf.dims)

    def cut(self, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Cut a batch's outputs back to its items.

        Args:
            arrays: one array ``(batch, *padded dims)`` for each leaf.
            sizes: sizes of the real items, in row order; rows after them are padding.

        Returns:
            For each item, its own arrays (copies: nothing is shared between replies or with the device).
        """
        rows: list[list[np.ndarray]] = [[] for _ in sizes]
        for leaf, array in zip(self.leaves, arrays, strict=True):
            if leaf.fixed:
                for row, out in enumerate(rows):
                    # The explicit form keeps a 0-d item an array; array[row] would give a scalar.
                    out.append(array[row, ...].copy())
                continue
            for row, out in enumerate(rows):
                shape = self.item_shape(leaf, sizes[row])
                out.append(array[(row, *map(slice, shape))].copy())
        return rows

    def check_batch(self, arrays: Sequence[np.ndarray], rows: int) -> None:
        """Check that every leaf has as many rows as the bucket.

        Raises:
            OutputError: if the model returned another number of rows.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            if array.ndim == 0 or array.shape[0] != rows:
                got = "no batch dim" if array.ndim == 0 else f"{array.shape[0]}"
                raise OutputError(f"output {leaf.name!r}: expected {rows} rows, got {got}")


def infer_outputs(
    run: Callable[[Any, dict[str, Any]], Any],
    params: Any,
    signature: Signature,
    declared: Mapping[str, str] | None = None,
) -> Outputs:
    """Infer the outputs by symbolic evaluation, by probing concrete sizes where that fails.

    Args:
        run: ``(params, inputs by name) -> tree``.
        params: tree of arrays or `jax.ShapeDtypeStruct`.
        signature: the inputs.
        declared: declarations ``name -> 'dtype[dims]'`` of outputs, which overrule what is inferred.

    Raises:
        SignatureError: if an output has no leading batch dim, or its dims are ambiguous and undeclared.
    """
    tree, dims_of = _symbolic(run, params, signature) or _probed(run, params, signature)
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = _names([path for path, _ in paths])
    if unknown := sorted(set(declared or {}) - set(names)):
        raise SignatureError(f"outputs are {names}; declared but not returned: {unknown}: remove it")
    leaves = []
    for index, (name, (_, leaf)) in enumerate(zip(names, paths, strict=True)):
        if declared is not None and name in declared:
            dims = parse_input("declared", declared[name]).dims
        else:
            dims = _item_dims(name, dims_of(index))
        leaves.append(Output(name, np.dtype(leaf.dtype), tuple(dims)))
    return Outputs(tuple(leaves), treedef, signature.axes)


def _names(paths: list[tuple[Any, ...]]) -> list[str]:
    """Names for the wire: the path in the tree, ``output`` for a lone array, ``output_0`` in a tuple."""
    names = []
    for path in paths:
        keys = [str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path]
        name = ".".join(keys)
        names.append("output" if not path else f"output_{name}" if name.isdigit() else name)
    return names


def _item_dims(name: str, dims: tuple[str | int | None, ...]) -> tuple[Dim, ...]:
    if not dims or dims[0] != BATCH:
        raise SignatureError(
            f"every output has the batch as its first dim; output {name!r} has dims {list(dims)}: return one "
            f"row for each item, for example by broadcasting, or leave it out"
        )
    for dim in dims[1:]:
        if dim is None or (isinstance(dim, str) and BATCH in dim):
            raise SignatureError(
                f"an output dim must follow from the axes of one item; output {name!r} has dims "
                f"{list(dims)}: declare it, outputs={{{name!r}: 'float32[...]'}}"
            )
    return tuple(dim for dim in dims[1:] if dim is not None)


_Inferred = tuple[Any, Callable[[int], tuple[str | int | None, ...]]]


def _symbolic(run: Callable[..., Any], params: Any, signature: Signature) -> _Inferred | None:
    names = (BATCH, *signature.axes)
    symbols = export.symbolic_shape(", ".join(names))
    try:
        inputs = signature.abstract(dict(zip(names, symbols, strict=True)))
        tree = jax.eval_shape(run, params, inputs)
    except Exception:  # any failure here only means: not symbolically evaluable; probing decides
        return None
    leaves = jax.tree.leaves(tree)
    if not all(hasattr(leaf, "shape") for leaf in leaves):
        return None
    return tree, lambda index: tuple(dim if isinstance(dim, int) else str(dim) for dim in leaves[index].shape)


def _probed(run: Callable[..., Any], params: Any, signature: Signature) -> _Inferred:
    """Evaluate shapes at a few sizes; a dim that equals one axis (or never moves) is unambiguous."""
    names = (BATCH, *signature.axes)
    # Distinct and co-prime, so that no axis can be mistaken for another or for a sum of two.
    probes = [
        dict(zip(names, sizes, strict=True))
        for sizes in (
            [2, *range(16, 16 + len(names) * 16, 16)][: len(names)],
            [4, *range(48, 48 + len(names) * 32, 32)][: len(names)],
        )
    ]
    trees = [jax.eval_shape(run, params, signature.abstract(probe)) for probe in probes]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in trees]

    def dims_of(index: int) -> tuple[str | int | None, ...]:
        pair = [shape[index] for shape in shapes]
        if len(pair[0]) != len(pair[1]):
            return (BATCH, None)
        return tuple(_probe_dim(first, second, probes) for first, second in zip(*pair, strict=True))

    return trees[0], dims_of


def _probe_dim(first: int, second: int, probes: list[dict[str, int]]) -> str | int | None:
    matches = [name for name in probes[0] if (probes[0][name], probes[1][name]) == (first, second)]
    if len(matches) == 1:
        return matches[0]
    if first == second and first not in probes[0].values():
        return int(first)
    return None
