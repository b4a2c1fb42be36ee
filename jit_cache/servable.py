"""A servable: a pure function, its parameters, what it takes and the grid of buckets it runs in."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..bucketing import Bucket, CostModel, Grid, Planner, SchemeLike
from .errors import SignatureError, call_remedy
from .hosts import Hosts, put_parts
from .infer import infer_outputs
from .limits import admissible, make_grid
from .outputs import Outputs
from .placement import Placement
from .signature import BATCH, Signature
from .staging import Staging
from .tune import STATIC, SWITCHED, TUNED


class Servable:
    """A pure JAX function that can be served at any size within its limits.

    Args:
        apply: ``apply(params, **inputs)``, or ``apply(**inputs)`` where ``params`` is None. Inputs arrive
            batched, ``(batch, *dims)``; every output leaf is ``(batch, ...)``. Pure: no state, no
            randomness of its own. Weights belong in ``params``; closed-over ones are refused when
            compiling, since each program would hold a copy.
        params: any pytree of arrays and numbers. Of a `jax.ShapeDtypeStruct` programs can be compiled
            before the weights are there.
        inputs: declaration of each input by name, such as ``{"ids": "int32[length]", "mask":
            "mask[length]"}``; see `servax.jit_cache.signature` for the grammar.
        limits: largest size of each varying axis; ``batch`` is the most rows run at once (default 32).
        scheme: how each axis gets its sizes: one scheme for all item axes, or one by axis name (``batch``
            included). A scheme is an object, a string such as ``"powers_of_two:16"``, or a list of sizes.
            Default: powers of two, from 1 for the batch and from 8 for the others.
        max_elements: drop buckets whose product of sizes is larger (the one-row bucket always stays).
        grid: the buckets themselves, instead of ``scheme`` and ``max_elements``.
        outputs: declarations ``name -> 'dtype[dims]'`` of outputs whose dims cannot be inferred; dims may be
            expressions such as ``2*length - 1``.
        name: the model's name on the wire.
        version: the model's version on the wire.
        allow_nonfinite: whether NaN and infinity may pass in float inputs.
        placement: several devices and how parameters and inputs are split over them; None for the default
            device.
        sizes: how a bucket becomes a program: ``static`` (one of its own), ``switched`` (all buckets are
            cases of one program, so that one call may run several) or ``tuned`` (both are made, and each
            bucket keeps the faster).
        variants: other functions of the same signature that give the same answers, by name; each bucket
            keeps the one that runs fastest in it. Warm-up makes and times each.

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
        placement: Placement | None = None,
        sizes: str = STATIC,
        variants: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        if grid is not None and (scheme is not None or max_elements is not None):
            raise SignatureError("a grid is given, or made of scheme and max_elements; got both: drop one")
        self.apply = apply
        self.name = name
        self.version = version
        self.allow_nonfinite = allow_nonfinite
        self.signature = Signature.parse(inputs)
        self._has_params = params is not None
        self.leaves, self._treedef = jax.tree.flatten(params)
        self.abstract_leaves = _abstract(params)
        self.placement = placement
        self._shardings = None if placement is None else placement.of_params(self.abstract_params)
        self._declared_outputs = outputs
        self._made: dict[str, Servable] = {}
        self.variant, self.layout = STATIC, "padded"
        self._variants = dict(variants or {})
        self.variants = _variant_names(sizes, self._variants, placement)
        for function in (apply, *self._variants.values()):
            check_call(function, [None] if self._has_params else [], inputs)
        self.limits = admissible(self.signature.axes, limits or {}, grid)
        self.grid = (
            grid if grid is not None else make_grid(self.signature.axes, self.limits, scheme, max_elements)
        )
        if self.grid.axes != (BATCH, *self.signature.axes):
            raise SignatureError(
                f"a grid has the axes of the inputs, {[BATCH, *self.signature.axes]}; got "
                f"{list(self.grid.axes)}: make it over those"
            )
        self.grid.check_coverage({axis: self.limits[axis] for axis in self.signature.axes})
        if grid is not None and self.limits[BATCH] > grid.max_rows:
            raise SignatureError(
                f"the most rows run at once are those of the largest bucket, {grid.max_rows}; the limit of "
                f"'batch' is {self.limits[BATCH]}: lower it, or add a bucket"
            )
        # With max_elements the grid may hold fewer rows than were asked for.
        self.limits[BATCH] = min(self.limits[BATCH], self.grid.max_rows)

    def __repr__(self) -> str:
        return f"Servable({self.name!r}, axes={list(self.signature.axes)}, buckets={len(self.grid.buckets)})"

    def run_flat(self, leaves: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Call ``apply`` with parameters given as flattened leaves; what gets traced."""
        if not self._has_params:
            return self.apply(**inputs)
        return self.apply(jax.tree.unflatten(self._treedef, leaves), **inputs)

    def as_variant(self, name: str) -> "Servable":
        """The servable with another of its functions; outputs stay those of the first, which it must keep.

        Args:
            name: one of `variants`, but for ``switched``, which is no function.

        Raises:
            SignatureError: if it has no function of that name.
        """
        if name == self.variant:
            return self
        if name not in self._variants:
            raise SignatureError(
                f"model {self.name!r} has the functions {[STATIC, *self._variants]}; got {name!r}: declare "
                f"it in variants"
            )
        made = self._made.get(name)
        if made is None:
            _ = self.outputs
            made = self._made[name] = copy.copy(self)
            made.apply, made.variant, made._made = self._variants[name], name, {}
            made.leaves = []  # the weights are the servable's, which lets the host's copies go
        return made

    def placed(self, placement: Placement) -> "Servable":
        """The servable on other devices; its outputs stay as they are.

        Raises:
            SignatureError: if its parameters cannot be split so.
        """
        _ = self.outputs
        made = copy.copy(self)
        made.placement, made._made = placement, {}
        made.leaves = []  # the weights are this servable's, which lets the host's copies go
        made._shardings = placement.of_params(self.abstract_params)
        return made

    @property
    def most_items(self) -> int:
        """Most items that one batch takes."""
        return self.limits[BATCH]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.abstract_leaves)

    @property
    def platform(self) -> str:
        """Where it runs: ``cpu``, ``gpu`` or ``tpu``."""
        device = jax.local_devices()[0] if self.placement is None else self.placement.devices[0]
        return str(device.platform)

    @property
    def devices(self) -> tuple[jax.Device, ...] | None:
        """The devices it is placed on, in order; None for the default one."""
        return None if self.placement is None else self.placement.devices

    @property
    def hosts(self) -> Hosts | None:
        """The processes that its devices belong to, where they are several."""
        return self.placement.hosts if self.placement is not None and self.placement.spans else None

    @property
    def shardings(self) -> list[NamedSharding] | None:
        """How each parameter is split, in order; None if it is on one device."""
        return self._shardings

    def traced_leaves(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters as programs take them: shape, dtype and, on several devices, how they are split."""
        if self._shardings is None:
            return self.abstract_leaves
        pairs = zip(self.abstract_leaves, self._shardings, strict=True)
        return [leaf.update(sharding=sharding) for leaf, sharding in pairs]

    @property
    def code(self) -> tuple[Any, ...]:
        """What decides its programs, beside shapes."""
        return (Servable.run_flat, self.apply)

    def program_inputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of what the program of a bucket takes."""
        return self.signature.abstract_at(bucket)

    def staging(self, bucket: Bucket) -> Staging:
        """Host buffers of one batch."""
        return Staging(self.signature, bucket)

    def planner(self, grid: Grid, cost: CostModel, window: int) -> Planner:
        """What chooses its batches.

        Args:
            grid: buckets that are warm.
            cost: of each.
            window: rows that are planned together.
        """
        return Planner(grid, cost, window)

    def traced_inputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs of a bucket as its program takes them."""
        found = self.program_inputs(bucket)
        place = self.placement
        if place is None:
            return found
        return {name: one.update(sharding=place.of_input(name, one.shape)) for name, one in found.items()}

    def place(self) -> Sequence[jax.Array]:
        """Put the parameters on the device, and let the host's copies go if nobody else holds them.

        Returns:
            The leaves as device arrays, in order; from now on they are ``leaves`` too.
        """
        where: Sequence[Any] = self._shardings or [None] * len(self.leaves)
        put = jax.device_put if self.hosts is None else put_parts
        self.leaves = [put(leaf, at) for leaf, at in zip(self.leaves, where, strict=True)]
        return self.leaves

    @property
    def abstract_params(self) -> Any:
        """The parameters' tree with shape and dtype in place of each leaf."""
        return jax.tree.unflatten(self._treedef, self.abstract_leaves)

    @property
    def declared_outputs(self) -> dict[str, str]:
        """Output declarations given by the user."""
        return dict(self._declared_outputs or {})

    @cached_property
    def outputs(self) -> Outputs:
        """What the function returns; inferred at the first use, without compiling anything."""
        return infer_outputs(
            self.run_flat, self.abstract_leaves, self.signature, self._declared_outputs, self.grid
        )

    def take_outputs(self, outputs: Outputs) -> None:
        """Return what a servable of the same code, declarations and grid does; traces nothing."""
        self.__dict__.setdefault("outputs", outputs)


def _variant_names(sizes: str, functions: Mapping[str, Any], placement: Placement | None) -> tuple[str, ...]:
    known = {STATIC: (STATIC,), SWITCHED: (SWITCHED,), TUNED: (STATIC, SWITCHED)}
    if sizes not in known:
        raise SignatureError(f"sizes are one of {list(known)}; got {sizes!r}: leave it out for {STATIC!r}")
    if sizes != STATIC and placement is not None and (placement.spans or not placement.automatic):
        raise SignatureError(
            f"sizes are {STATIC!r} on devices of several processes, and on a mesh with explicit axes; got "
            f"{sizes!r}: leave it out, or make the mesh of this process's devices with AxisType.Auto"
        )
    if taken := sorted({STATIC, SWITCHED} & functions.keys()):
        raise SignatureError(f"variants have names of their own; {taken} are taken: choose others")
    return (*known[sizes], *functions)


def check_call(function: Callable[..., Any], positional: Sequence[Any], names: Iterable[str]) -> None:
    """Raise a SignatureError unless a function takes these arguments, and these names as keywords."""
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(names))
    except TypeError as error:
        called = getattr(function, "__qualname__", type(function).__name__)
        raise SignatureError(
            f"a model is called with its parameters (if it has any) and its declared inputs as keywords, "
            f"here {list(names)}; {called} does not take that: {error}{call_remedy(error)}"
        ) from None
    except ValueError:  # some callables of C have no signature; tracing will tell
        return


def _abstract(params: Any) -> list[jax.ShapeDtypeStruct]:
    """Shape, dtype and weak type of each leaf; a Python number stays weak, as in a plain call."""
    abstract = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        try:
            kind = jax.typeof(leaf)  # traces nothing, so that it works in a sealed process too
        except TypeError:
            raise SignatureError(
                f"params are a tree of arrays and numbers; the leaf at params{jax.tree_util.keystr(path)} is "
                f"{type(leaf).__name__}: close over settings that are no numbers instead"
            ) from None
        abstract.append(jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type))
    return abstract
