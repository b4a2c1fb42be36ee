"""Nested items in, one padded batch out, and back: the padding of a data loader.

A tree is a dict, list or tuple of trees, or an array. What varies is said per leaf by its dims.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bucket import Bucket
from .errors import PaddingError
from .padding import fill_mask, pad_rows

Tree = Any


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch padded to a bucket.

    Args:
        data: A tree like one item's, each leaf with the batch in front.
        sizes: `(items, item axes)`, int64: the real sizes.
        bucket: What it was padded to.
    """

    data: Tree
    sizes: NDArray[np.int64]
    bucket: Bucket

    def mask(self) -> NDArray[np.bool_]:
        """`(batch, *item sizes)`, True on what is real."""
        out = np.zeros(self.bucket.sizes, bool)
        fill_mask(out, self.sizes)
        return out

    @property
    def waste(self) -> float:
        """1 - real elements / computed elements."""
        return 1 - float(self.sizes.prod(axis=1).sum()) / self.bucket.elements


def pad_batch(
    items: Sequence[Tree], bucket: Bucket, *, dims: Tree | None = None, pad: Tree = 0
) -> PaddedBatch:
    """Stack items of varying sizes into one batch of exactly the bucket's shape.

    Args:
        items: At least one and at most `bucket.rows` trees of the same structure.
        bucket: The shape to pad to.
        dims: For each leaf, its dims in order as words: an axis of the bucket, or `_` for a dim that
            never varies; such as `{"ids": "length", "image": "height width _", "label": ""}`.
            None means that a leaf's first dims are the bucket's item axes, in order, as far as the
            leaf has dims.
        pad: The value of padding, one for all leaves or a tree with one for each.

    Returns:
        The batch. A size of an axis is the same in every leaf of an item that has the axis.

    Raises:
        PaddingError: naming the leaf, if structures, sizes or dims disagree or do not fit.
    """
    if not items:
        raise PaddingError("A batch needs at least one item; got none.")
    leaves = [_leaves(item) for item in items]
    paths = list(leaves[0])
    for place, flat in enumerate(leaves):
        if list(flat) != paths:
            raise PaddingError(
                f"All items have the same structure; item 0 has {paths}, item {place} {list(flat)}."
            )
    named = _dims(leaves[0], bucket, dims)
    pads: dict[str, Any] = dict(_walk("", pad)) if isinstance(pad, dict | list | tuple) else {}
    pads = pads or dict.fromkeys(paths, pad)
    if list(pads) != paths:
        raise PaddingError(f"pad is one value, or one for each of {paths}; got one for each of {list(pads)}.")
    sizes = np.array([_item_sizes(flat, named, bucket, place) for place, flat in enumerate(leaves)], np.int64)
    buffers: dict[str, NDArray[Any]] = {}
    for path in paths:
        first = leaves[0][path]
        shape = tuple(
            bucket[name] if name in bucket.axes[1:] else full
            for name, full in zip(named[path], first.shape, strict=True)
        )
        buffers[path] = np.empty(
            (bucket.rows, *shape), np.result_type(*(flat[path].dtype for flat in leaves))
        )
        try:
            pad_rows(buffers[path], [flat[path] for flat in leaves], pads[path])
        except PaddingError as error:
            raise PaddingError(f"Leaf {path or 'of the item'}: {error}") from None
    return PaddedBatch(_rebuilt(items[0], lambda path: buffers[path]), sizes.reshape(len(items), -1), bucket)


def unpad(tree: Tree, batch: PaddedBatch, *, dims: Tree | None = None) -> list[Tree]:
    """Cut a batched tree, such as a model's output, back into one tree for each item.

    Args:
        tree: Leaves with the batch in front and then dims as in `dims`.
        batch: What `pad_batch` returned for the inputs.
        dims: As in `pad_batch`, for the leaves of this tree.

    Returns:
        The items in their order; the leaves are views.

    Raises:
        PaddingError: if a leaf's first dim is not the batch, or its dims do not fit the bucket.
    """
    flat = _leaves(tree)
    for path, leaf in flat.items():
        if leaf.ndim == 0 or len(leaf) != batch.bucket.rows:
            raise PaddingError(
                f"Leaf {path} has the batch of {batch.bucket.rows} in front; got {leaf.shape}."
            )
    named = _dims({path: leaf[0] for path, leaf in flat.items()}, batch.bucket, dims)
    items: list[Tree] = []
    for row, real in enumerate(batch.sizes.tolist()):
        known = dict(zip(batch.bucket.axes[1:], real, strict=True))

        def cut(path: str, row: int = row, known: dict[str, int] = known) -> NDArray[Any]:
            return flat[path][(row, *(slice(known.get(name)) for name in named[path]))]

        items.append(_rebuilt(tree, cut))
    return items


def _dims(leaves: dict[str, NDArray[Any]], bucket: Bucket, dims: Tree | None) -> dict[str, list[str]]:
    axes = bucket.axes[1:]
    if dims is None:
        return {path: ([*axes, *["_"] * leaf.ndim])[: leaf.ndim] for path, leaf in leaves.items()}
    words = {path: str(text).split() for path, text in _walk("", dims)}
    if list(words) != list(leaves):
        raise PaddingError(f"dims name each leaf of {list(leaves)}; got {list(words)}.")
    for path, leaf in leaves.items():
        if len(words[path]) != leaf.ndim or not set(words[path]) <= {*axes, "_"}:
            raise PaddingError(
                f"Leaf {path or 'of the item'} of shape {leaf.shape} needs one word for each dim, an axis of "
                f"{axes} or _; got {' '.join(words[path])!r}."
            )
    return words


def _item_sizes(
    flat: dict[str, NDArray[Any]], named: dict[str, list[str]], bucket: Bucket, place: int
) -> list[int]:
    found: dict[str, int] = {}
    for path, leaf in flat.items():
        for name, size in zip(named[path], leaf.shape, strict=False):
            if name != "_" and found.setdefault(name, size) != size:
                raise PaddingError(
                    f"An axis has one size in all leaves of an item; item {place} has {name} {found[name]} "
                    f"and, in leaf {path}, {size}."
                )
    missing = [axis for axis in bucket.axes[1:] if axis not in found]
    if missing:
        raise PaddingError(
            f"Every axis of the bucket is a dim of some leaf; {missing} is of none. Pass dims."
        )
    return [found[axis] for axis in bucket.axes[1:]]


def _walk(path: str, tree: Tree) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        pairs = sorted(tree.items())
    elif isinstance(tree, list | tuple):
        pairs = [(str(place), branch) for place, branch in enumerate(tree)]
    else:
        return [(path, tree)]
    return [leaf for key, branch in pairs for leaf in _walk(f"{path}/{key}" if path else str(key), branch)]


def _leaves(tree: Tree) -> dict[str, NDArray[Any]]:
    return {path: np.asarray(leaf) for path, leaf in _walk("", tree)}


def _rebuilt(tree: Tree, make: Callable[[str], NDArray[Any]], path: str = "") -> Tree:
    def below(key: object, branch: Tree) -> Tree:
        return _rebuilt(branch, make, f"{path}/{key}" if path else str(key))

    if isinstance(tree, dict):
        return {key: below(key, branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        branches = [below(place, branch) for place, branch in enumerate(tree)]
        if isinstance(tree, list):
            return branches
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return make(path)
