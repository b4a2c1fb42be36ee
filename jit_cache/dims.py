"""Dims as expressions of the axes: ``2*length - 1``, ``floordiv(height + 1, 2)``.

The grammar is the one in which `jax.export.symbolic_shape` prints and reads dims, with ``//``, ``%`` and
``**`` allowed for whoever writes one by hand; so no private API of JAX is needed to evaluate what it printed.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from .errors import SignatureError

Evaluate = Callable[[Sequence[int]], int]

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CALLS: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


@lru_cache(maxsize=1024)
def compile_dim(expression: str, axes: tuple[str, ...]) -> Evaluate:
    """Read a dim expression once, so that evaluating it for each item is cheap.

    Args:
        expression: over the axes.
        axes: names, in the order in which sizes will be given.

    Returns:
        A function from sizes, in the order of ``axes``, to the dim.

    Raises:
        SignatureError: if the expression is outside the grammar.
    """

    def walk(node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return lambda _: value
            case ast.Name(id=name) if name in axes:
                return operator.itemgetter(axes.index(name))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = walk(operand)
                return lambda sizes: -inner(sizes)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _apply(_BINARY[type(op)], walk(left), walk(right))
            case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _CALLS:
                return _apply(_CALLS[name], walk(left), walk(right))
        raise SignatureError(
            f"an output dim is an expression of the axes {list(axes)} with +, -, *, ^ and {sorted(_CALLS)}; "
            f"got {expression!r}: declare the outputs of the servable by hand"
        )

    return walk(_parse(expression))


def _apply(function: Callable[[int, int], int], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda sizes: function(left(sizes), right(sizes))


def _parse(expression: str) -> ast.expr:
    try:
        # A power is printed as a^2; in Python ^ binds weaker than + and *, so it cannot be read as such.
        return ast.parse(expression.strip().replace("^", "**"), mode="eval").body
    except SyntaxError:
        raise SignatureError(
            f"an output dim is an expression such as '2*length - 1'; got {expression!r}: declare the outputs "
            f"of the servable by hand"
        ) from None


def evaluate_dim(expression: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a dim expression at concrete sizes by axis name.

    Raises:
        SignatureError: if the expression is outside the grammar.
    """
    return compile_dim(expression, tuple(sizes))(tuple(sizes.values()))


def names_in(expression: str) -> set[str]:
    """The axes that a dim expression speaks of."""
    found = {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}
    return found - set(_CALLS)
