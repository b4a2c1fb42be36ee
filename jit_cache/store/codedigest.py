"""The digest of a Python callable and of everything it reaches, without tracing it.

The values reached form a graph, with cycles (a method that says ``super()`` reaches its class). Its nodes
are hashed from the leaves up, one strongly connected component at a time (Tarjan 1972); inside a component
labels are refined as often as it has nodes (Weisfeiler and Leman 1968), so neither the order of a
dictionary nor where the walk enters a cycle changes the result.
"""

import hashlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import FingerprintError
from .code_parts import Part, Scoped, Used
from .describe import describe

_MOST_NODES = 200_000


@dataclass(frozen=True, slots=True)
class CodeDigest:
    """What a callable is.

    Attributes:
        digest: SHA-256 of it and all it reaches, hexadecimal.
        units: a short digest of each function reached, by qualified name; only to explain differences.
        array_bytes: bytes of arrays it closes over.
    """

    digest: str
    units: Mapping[str, str]
    array_bytes: int


def digest_of(value: Any) -> CodeDigest:
    """Digest a callable, or any value that decides what is compiled.

    The user's functions enter by bytecode, constants, closures, defaults and the globals they read;
    functions of installed libraries by name and release; arrays and configuration by content, dictionaries
    without their order.

    Raises:
        FingerprintError: if it reaches something that only its address identifies, or far too much.
    """
    parts, edges, values = _walk(value)
    labels = _label(parts, edges)
    units: dict[str, str] = {}
    for index, found in enumerate(values):
        if isinstance(found, types.FunctionType) and parts[index].tag == ("function",):
            # The code alone, so that a change shows at one function and not at all its callers.
            code = parts[edges[index][0]]
            units[f"{found.__module__}.{found.__qualname__}"] = _hash(code.tag, _constants(found))[:8]
    arrays = sum(part.tag[4] for part in parts if part.tag[0] == "array")
    return CodeDigest(labels[0].hex(), dict(sorted(units.items())), arrays)


def _constants(function: types.FunctionType) -> list[str]:
    return [repr(one) for one in function.__code__.co_consts if not isinstance(one, types.CodeType)]


def _hash(tag: tuple[Any, ...], children: Sequence[Any]) -> str:
    return hashlib.sha256(repr((tag, children)).encode()).hexdigest()


def _walk(root: Any) -> tuple[list[Part], list[list[int]], list[Any]]:
    parts: list[Part] = []
    edges: list[list[int]] = []
    values: list[Any] = [root]  # keeps all alive, so that no address is used twice
    index_of: dict[Any, int] = {_identity(root): 0}
    position = 0
    while position < len(values):
        part = _described(values[position])
        children = []
        for child in part.children:
            identity = _identity(child)
            if identity not in index_of:
                index_of[identity] = len(values)
                values.append(child)
            children.append(index_of[identity])
        parts.append(part)
        edges.append(children)
        position += 1
        if len(values) > _MOST_NODES:
            raise FingerprintError(
                f"a model's code reaches a bounded part of the program; it reaches more than {_MOST_NODES} "
                f"values: pass large tables as arguments"
            )
    return parts, edges, values


def _described(value: Any) -> Part:
    try:
        return describe(value)
    except FingerprintError:
        raise
    except Exception as error:  # attributes and reprs run code of the user's
        kind = type(value)
        raise FingerprintError(
            f"a model's code is described by content; looking at a {kind.__module__}.{kind.__qualname__} "
            f"gave {type(error).__name__}: {error}: pass it as an argument"
        ) from error


def _identity(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return (type(value), repr(value))
    if isinstance(value, Scoped):
        return (Scoped, id(value.code), id(value.scope))
    if isinstance(value, Used):
        return (Used, id(value.module), value.names, value.whole)
    return id(value)


def _label(parts: Sequence[Part], edges: Sequence[Sequence[int]]) -> list[bytes]:
    labels: list[bytes] = [b""] * len(parts)
    own = [hashlib.sha256(repr((part.tag, part.ordered)).encode()).digest() for part in parts]
    for component in _components(edges):
        if len(component) == 1 and component[0] not in edges[component[0]]:
            index = component[0]
            labels[index] = _combine(own[index], [labels[one] for one in edges[index]], parts[index].ordered)
            continue
        for index in component:
            labels[index] = own[index]
        for _ in component:
            new = [
                _combine(own[index], [labels[one] for one in edges[index]], parts[index].ordered)
                for index in component
            ]
            for index, label in zip(component, new, strict=True):
                labels[index] = label
        whole = b"".join(sorted(labels[index] for index in component))
        for index in component:
            labels[index] = _combine(labels[index], [whole], True)
    return labels


def _combine(own: bytes, children: Sequence[bytes], ordered: bool) -> bytes:
    return hashlib.sha256(own + b"".join(children if ordered else sorted(children))).digest()


def _components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Strongly connected components, each after all that it points to; iterative Tarjan."""
    found: list[list[int]] = []
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    work: list[tuple[int, int]] = [(0, 0)]
    while work:
        node, edge = work.pop()
        if edge == 0:
            order[node] = low[node] = len(order)
            stack.append(node)
            on_stack.add(node)
        else:
            low[node] = min(low[node], low[edges[node][edge - 1]])
        following = edge
        while following < len(edges[node]):
            child = edges[node][following]
            following += 1
            if child not in order:
                work += [(node, following), (child, 0)]
                break
            if child in on_stack:
                low[node] = min(low[node], order[child])
        else:
            if low[node] == order[node]:
                component: list[int] = []
                while not component or component[-1] != node:
                    component.append(stack.pop())
                for one in component:  # `difference_update` may copy the whole set each time
                    on_stack.discard(one)
                found.append(component)
    return found
