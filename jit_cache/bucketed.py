"""`jax.jit` that pads to buckets instead of recompiling; for scripts, notebooks and training loops.

Lazy: a bucket is compiled in the call that first needs it. Whoever must never compile in a call uses a
`Server`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec

import jax
import numpy as np
from jax import export

from ..bucketing import Ladder, SchemeLike, as_scheme, powers_of_two
from .errors import InputError, ItemTooLarge, SignatureError
from .outputs import evaluate_dim

P = ParamSpec("P")
_UNLIMITED = 1 << 30


Dims = tuple[int | str, ...]


class _Padded:
    """One argument that is padded: its dims (numbers or axis names) and its pad value."""

    __slots__ = ("dims", "name", "pad")

    def __init__(self, name: str, declaration: str) -> None:
        dims, _, pad = declaration.partition("=")
        parts = [part.strip() for part in dims.split(",") if part.strip()]
        if not parts or not all(part.isdigit() or part.isidentifier() for part in parts):
            raise SignatureError(
                f"dims are numbers and axis names between commas, such as 'batch, length' or 'batch = -100'; "
                f"argument {name!r} has {declaration!r}"
            )
        self.name = name
        self.dims = tuple(int(part) if part.isdigit() else part for part in parts)
        try:
            self.pad = float(pad) if "." in pad else int(pad or 0)
        except ValueError:
            raise SignatureError(f"a pad value is a number; argument {name!r} has {pad.strip()!r}") from None


class Bucketed(Generic[P]):
    """A jitted function whose named array arguments are padded; made by `bucketed`.

    Attributes:
        buckets: sizes by axis of every bucket that was compiled so far.
        computed_elements: elements of the buckets that were run, summed over calls.
        real_elements: elements before padding, summed over calls.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        *,
        dims: Mapping[str, str],
        masks: Mapping[str, str],
        limits: Mapping[str, int],
        scheme: SchemeLike | Mapping[str, SchemeLike] | None,
        donate: Sequence[str],
        static: Sequence[str],
    ) -> None:
        update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        self._padded = [_Padded(name, text) for name, text in dims.items()]
        self._masks = [_Padded(name, text) for name, text in masks.items()]
        self.axes = tuple(dict.fromkeys(d for one in self._padded for d in one.dims if isinstance(d, str)))
        self._check(limits, [*donate, *static])
        self._limits = dict(limits)
        self._ladders = {axis: self._ladder(axis, scheme) for axis in self.axes}
        self._static = frozenset(static)
        self._jitted = jax.jit(function, donate_argnames=tuple(donate), static_argnames=tuple(static))
        self._outputs: dict[tuple[int, ...], list[Dims | None]] = {}
        self.computed_elements = self.real_elements = 0

    def _check(self, limits: Mapping[str, int], named: Sequence[str]) -> None:
        known = list(self._signature.parameters)
        names = [one.name for one in (*self._padded, *self._masks)]
        if unknown := [name for name in (*names, *named) if name not in known]:
            raise SignatureError(
                f"the arguments of {self._function.__name__} are {known}; got {unknown}: rename it"
            )
        if not self.axes:
            raise SignatureError(
                "at least one argument has a varying axis; name one, such as 'batch, length'"
            )
        if unknown := [axis for axis in limits if axis not in self.axes]:
            raise SignatureError(f"limits are for the axes {list(self.axes)}; got {unknown}: remove it")
        for mask in self._masks:
            if not all(dim in self.axes for dim in mask.dims):
                raise SignatureError(
                    f"a mask is over axes of {list(self.axes)}; {mask.name!r} has {list(mask.dims)}"
                )

    def _ladder(self, axis: str, scheme: SchemeLike | Mapping[str, SchemeLike] | None) -> Ladder:
        chosen = scheme.get(axis) if isinstance(scheme, Mapping) else scheme
        return as_scheme(chosen or powers_of_two(8)).ladder(self._limits.get(axis, _UNLIMITED))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Pad, run and cut.

        Padded arguments are array-likes on the host (device arrays are fetched). Outputs whose dims vary
        come back as NumPy arrays cut to the real sizes, the others as they are on the device.

        Raises:
            InputError: wrong rank, an axis with two sizes, an empty axis.
            ItemTooLarge: a size beyond its limit.
            SignatureError: if an output's dims do not follow from the axes.
        """
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given)):
            # Inside somebody's own jit or grad shapes are fixed already, and values are not on the host.
            sizes = self._sizes({one.name: given[one.name] for one in self._padded})
            return self._call(given, self._make_masks(sizes, sizes))
        arrays = {one.name: np.asarray(given[one.name]) for one in self._padded}
        sizes = self._sizes(arrays)
        bucket = {axis: self._ladders[axis].rung_for(size) for axis, size in sizes.items()}
        call = {**given, **self._pad(arrays, bucket), **self._make_masks(sizes, bucket)}
        self.real_elements += int(np.prod(list(sizes.values())))
        self.computed_elements += int(np.prod(list(bucket.values())))
        dims = self._dims_of(call, bucket)  # before the call: donated arguments are gone after it
        return self._cut(self._jitted(**call), dims, sizes)

    def _sizes(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for one in self._padded:
            shape = arrays[one.name].shape
            if len(shape) != len(one.dims):
                raise InputError(f"argument {one.name!r} has dims {list(one.dims)}; got shape {list(shape)}")
            for dim, size in zip(one.dims, shape, strict=True):
                wanted = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
                if size != wanted or size == 0:
                    raise InputError(
                        f"argument {one.name!r} has dims {list(one.dims)}; got shape {list(shape)}, where "
                        f"{dim} must be {wanted or 'at least 1'}"
                    )
                if isinstance(dim, str) and size > self._ladders[dim].limit:
                    raise ItemTooLarge(
                        f"axis {dim!r} is limited to {self._ladders[dim].limit}; argument {one.name!r} has "
                        f"{size}: cut it or raise the limit"
                    )
        return sizes

    def _pad(self, arrays: Mapping[str, np.ndarray], bucket: Mapping[str, int]) -> dict[str, np.ndarray]:
        padded = {}
        for one in self._padded:
            array = arrays[one.name]
            shape = tuple(bucket[dim] if isinstance(dim, str) else dim for dim in one.dims)
            if array.shape == shape:
                padded[one.name] = array
                continue
            # A fresh buffer for each call: the device may still read the one of the call before.
            out = np.full(shape, one.pad, array.dtype)
            out[tuple(map(slice, array.shape))] = array
            padded[one.name] = out
        return padded

    def _make_masks(self, sizes: Mapping[str, int], bucket: Mapping[str, int]) -> dict[str, np.ndarray]:
        made = {}
        for mask in self._masks:
            axes = [str(dim) for dim in mask.dims]
            out = np.zeros([bucket[axis] for axis in axes], np.bool_)
            out[tuple(slice(sizes[axis]) for axis in axes)] = True
            made[mask.name] = out
        return made

    @property
    def buckets(self) -> list[dict[str, int]]:
        """Sizes by axis of every bucket compiled so far."""
        return [dict(zip(self.axes, sizes, strict=True)) for sizes in self._outputs]

    @property
    def compiles(self) -> int:
        """Number of buckets compiled so far."""
        return len(self._outputs)

    @property
    def waste(self) -> float:
        """Padding waste over all calls: 1 - real / computed elements."""
        return 1 - self.real_elements / self.computed_elements if self.computed_elements else 0.0

    def _dims_of(self, call: Mapping[str, Any], bucket: Mapping[str, int]) -> list[Dims | None]:
        """Dims of each output leaf, or None for one that does not vary; once for each bucket."""
        key = tuple(bucket[axis] for axis in self.axes)
        if key not in self._outputs:
            self._outputs[key] = self._infer(call)
        return self._outputs[key]

    def _infer(self, call: Mapping[str, Any]) -> list[Dims | None]:
        symbols = dict(zip(self.axes, export.symbolic_shape(", ".join(self.axes)), strict=True))
        static = {name: call[name] for name in self._static if name in call}
        abstract = {name: value for name, value in call.items() if name not in static}
        for one in (*self._padded, *self._masks):
            shape = tuple(symbols[dim] if isinstance(dim, str) else dim for dim in one.dims)
            abstract[one.name] = jax.ShapeDtypeStruct(
                shape, jax.dtypes.canonicalize_dtype(call[one.name].dtype)
            )
        try:
            tree = jax.eval_shape(partial(self._call, static), abstract)
        except Exception as error:
            raise SignatureError(
                f"output dims follow from a symbolic evaluation over {list(self.axes)}; "
                f"{self._function.__name__} cannot be evaluated so: {str(error).splitlines()[0]}"
            ) from error
        found: list[Dims | None] = []
        for leaf in jax.tree.leaves(tree):
            dims = tuple(dim if isinstance(dim, int) else str(dim) for dim in leaf.shape)
            found.append(dims if any(isinstance(dim, str) for dim in dims) else None)
        return found

    def _call(self, static: Mapping[str, Any], traced: Mapping[str, Any]) -> Any:
        function: Callable[..., Any] = self._function
        return function(**traced, **static)

    def _cut(self, result: Any, dims: list[Dims | None], sizes: Mapping[str, int]) -> Any:
        leaves, treedef = jax.tree.flatten(result)
        cut = []
        for leaf, leaf_dims in zip(leaves, dims, strict=True):
            if leaf_dims is None:
                cut.append(leaf)
                continue
            shape = [dim if isinstance(dim, int) else evaluate_dim(dim, sizes) for dim in leaf_dims]
            cut.append(np.asarray(leaf)[tuple(map(slice, shape))])
        return jax.tree.unflatten(treedef, cut)


def bucketed(
    *,
    dims: Mapping[str, str],
    masks: Mapping[str, str] | None = None,
    limits: Mapping[str, int] | None = None,
    scheme: SchemeLike | Mapping[str, SchemeLike] | None = None,
    donate: Sequence[str] = (),
    static: Sequence[str] = (),
) -> Callable[[Callable[P, Any]], Bucketed[P]]:
    """Decorate a pure function as `jax.jit` would, but pad its named arguments to buckets.

    Args:
        dims: dims of each padded argument, with an optional pad value: ``{"ids": "batch, length",
            "labels": "batch = -100"}``. Names are axes; the same name has one size in a call.
        masks: arguments that the caller leaves out and that are made here: bool, true on real elements.
        limits: largest size of an axis; without one it has none.
        scheme: one scheme for all axes, or one by axis name. Default: powers of two from 8.
        donate: arguments whose buffers the outputs may take over, as in `jax.jit`.
        static: arguments that are compile-time constants, as in `jax.jit`.

    Returns:
        A decorator. The decorated function counts its ``compiles`` and its padding ``waste``.

    Raises:
        SignatureError: if a declaration does not fit the function.
    """

    def decorate(function: Callable[P, Any]) -> Bucketed[P]:
        return Bucketed(
            function,
            dims=dims,
            masks=masks or {},
            limits=limits or {},
            scheme=scheme,
            donate=donate,
            static=static,
        )

    return decorate
