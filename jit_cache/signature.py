"""What a servable takes: dtypes and named dims per item, and the inputs the server makes itself.

The grammar of one declaration, dims being those of ONE item (the server adds the batch dim):

    int32[length]            sent by the caller; the varying axis is called ``length``
    int32[length] = 1        the same, padded with 1 instead of 0
    uint8[height, width, 3]  two varying axes and one fixed dim
    float32[]                a scalar for each item
    mask[length]             made here: bool, true on real elements   -> (batch, length)
    lengths[length]          made here: int32, real size of that axis -> (batch,)
    positions[length]        made here: int32, 0, 1, 2, ...           -> (batch, length)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ..bucketing import Bucket
from .errors import InputError, ItemTooLarge, NonFinite, SignatureError

BATCH = "batch"
Dim = int | str
_DECLARATION = re.compile(r"^\s*(?P<kind>[a-z0-9_]+)\s*\[(?P<dims>[^\]]*)\]\s*(?:=\s*(?P<pad>\S+))?\s*$")
_MADE_DTYPES = {"mask": np.dtype(np.bool_), "lengths": np.dtype(np.int32), "positions": np.dtype(np.int32)}


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the caller sends with each item.

    Attributes:
        name: keyword of the apply function.
        dtype: NumPy dtype (``ml_dtypes`` types included).
        dims: dims of one item; a ``str`` names a varying axis.
        pad: value written where an item is smaller than its bucket.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]
    pad: float | int | bool = 0

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Dims of one item, as the wire protocols show them."""
        return self.dims


@dataclass(frozen=True, slots=True)
class Made:
    """One tensor that the server makes from the sizes of the items.

    Attributes:
        name: keyword of the apply function.
        kind: ``mask``, ``lengths`` or ``positions``.
        dims: the varying axes it speaks of.
    """

    name: str
    kind: str
    dims: tuple[str, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """bool for a mask, int32 otherwise."""
        return _MADE_DTYPES[self.kind]


def _parse_dims(name: str, text: str) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if part.isdigit():
            dims.append(int(part))
        elif part.isidentifier() and part != BATCH:
            dims.append(part)
        else:
            raise SignatureError(
                f"a dim is a number or the name of an axis, and 'batch' is added by the server; input "
                f"{name!r} has {part!r}: write for example 'int32[length]' or 'uint8[height, width, 3]'"
            )
    return tuple(dims)


def _parse_pad(name: str, dtype: np.dtype[Any], text: str | None) -> float | int | bool:
    if text is None:
        return 0
    try:
        value = float(text) if "." in text or "e" in text or "n" in text else int(text)
        np.asarray([value]).astype(dtype, casting="unsafe")
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise ValueError(text)
    except ValueError:
        raise SignatureError(
            f"the pad value must be a number that {dtype} holds; input {name!r} has {text!r}: "
            f"write for example '= 0'"
        ) from None
    return value


def parse_input(name: str, declaration: str) -> Input | Made:
    """Read one declaration of the grammar above.

    Raises:
        SignatureError: if it does not follow the grammar.
    """
    if not name.isidentifier():
        raise SignatureError(
            f"an input's name is a keyword of the apply function, so it must be an identifier; got {name!r}"
        )
    match = _DECLARATION.match(declaration)
    if match is None:
        raise SignatureError(
            f"an input is declared as 'dtype[dims]', dims being those of one item; input {name!r} is "
            f"{declaration!r}: write for example 'int32[length]'"
        )
    kind, dims = match["kind"], _parse_dims(name, match["dims"])
    if kind in _MADE_DTYPES:
        return _parse_made(name, kind, dims, match["pad"])
    try:
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    except TypeError:
        raise SignatureError(
            f"a dtype is one that NumPy or ml_dtypes knows; input {name!r} has {kind!r}: use for example "
            f"int32, float32, bfloat16, or one of {sorted(_MADE_DTYPES)} for an input made by the server"
        ) from None
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise SignatureError(
            f"64-bit types need jax_enable_x64, which is off; input {name!r} has {kind}: declare "
            f"{jax.dtypes.canonicalize_dtype(dtype)} (callers may still send {kind} where the values fit) "
            f"or switch x64 on before importing the model"
        )
    return Input(name, dtype, dims, _parse_pad(name, dtype, match["pad"]))


def _parse_made(name: str, kind: str, dims: tuple[Dim, ...], pad: str | None) -> Made:
    axes = tuple(dim for dim in dims if isinstance(dim, str))
    if pad is not None or len(axes) != len(dims) or not axes or (kind != "mask" and len(axes) != 1):
        raise SignatureError(
            f"'{kind}' is made by the server from varying axes only (a mask may name several, the others "
            f"one) and takes no pad value; input {name!r} has dims {dims}: write for example '{kind}[length]'"
        )
    return Made(name, kind, axes)


@dataclass(frozen=True, slots=True)
class Signature:
    """All inputs of a servable.

    Attributes:
        inputs: what the caller sends, in declaration order.
        made: what the server makes.
        axes: the varying axes in order of appearance, without ``batch``.
    """

    inputs: tuple[Input, ...]
    made: tuple[Made, ...]
    axes: tuple[str, ...]

    @classmethod
    def parse(cls, declarations: Mapping[str, str]) -> "Signature":
        """Read the declarations of a servable, by input name.

        Raises:
            SignatureError: on the first declaration that cannot be read, on a made input over an axis
                that no sent input has, and if the caller would send nothing.
        """
        parsed = [parse_input(name, text) for name, text in declarations.items()]
        inputs = tuple(one for one in parsed if isinstance(one, Input))
        made = tuple(one for one in parsed if isinstance(one, Made))
        if not inputs:
            raise SignatureError(
                f"a servable needs at least one input that the caller sends; got {dict(declarations)}"
            )
        axes = tuple(dict.fromkeys(dim for one in inputs for dim in one.dims if isinstance(dim, str)))
        for one in made:
            if unknown := [axis for axis in one.dims if axis not in axes]:
                raise SignatureError(
                    f"an input made by the server speaks of axes of the sent inputs, here {list(axes)}; "
                    f"{one.name!r} names {unknown}"
                )
        return cls(inputs, made, axes)

    def shape_of(self, one: Input | Made, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Shape of one input, batch first, at given (possibly symbolic) sizes by axis name."""
        if isinstance(one, Made) and one.kind == "lengths":
            return (sizes[BATCH],)
        return (sizes[BATCH], *(sizes[dim] if isinstance(dim, str) else dim for dim in one.dims))

    def abstract(self, sizes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every input, sent and made, at given sizes by axis name."""
        return {
            one.name: jax.ShapeDtypeStruct(self.shape_of(one, sizes), one.dtype)
            for one in (*self.inputs, *self.made)
        }

    def abstract_at(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every input in a bucket."""
        return self.abstract(dict(zip(bucket.axes, bucket.sizes, strict=True)))

    def item_sizes(self, item: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """Sizes of one checked item, in the order of ``axes``; see `check_item`."""
        sizes: dict[str, int] = {}
        for one in self.inputs:
            for dim, size in zip(one.dims, item[one.name].shape, strict=True):
                if isinstance(dim, str):
                    sizes[dim] = size
        return tuple(sizes[axis] for axis in self.axes)


def check_item(
    signature: Signature,
    item: Mapping[str, Any],
    limits: Mapping[str, int],
    *,
    allow_nonfinite: bool = False,
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Check one item at the door and bring it into the declared form.

    Args:
        signature: the declared inputs.
        item: array-likes by input name, without a batch dim.
        limits: largest size of each varying axis.
        allow_nonfinite: whether NaN and infinity may pass in float inputs.

    Returns:
        The arrays (declared dtypes; a copy only where a cast was needed) and the item's sizes in the
        order of ``signature.axes``.

    Raises:
        InputError: unknown or missing names, a dtype that cannot be cast without loss, a wrong rank or
            fixed dim, an axis whose size differs between inputs, an empty axis.
        ItemTooLarge: an axis beyond its limit.
        NonFinite: NaN or infinity where refused.
    """
    if unknown := [name for name in item if all(one.name != name for one in signature.inputs)]:
        raise InputError(
            f"inputs are {[one.name for one in signature.inputs]}; got unknown {unknown}: leave it out"
        )
    sizes: dict[str, int] = {}
    arrays: dict[str, np.ndarray] = {}
    for one in signature.inputs:
        if one.name not in item:
            raise InputError(
                f"inputs are {[known.name for known in signature.inputs]}; {one.name!r} is missing: send it"
            )
        array = cast_exact(one.name, item[one.name], one.dtype)
        _check_dims(one, array.shape, sizes, limits)
        if not allow_nonfinite and one.dtype.kind not in "iub" and not np.isfinite(array).all():
            raise NonFinite(
                f"input {one.name!r} must be finite; it holds NaN or infinity: clean it, or declare the "
                f"servable with allow_nonfinite=True"
            )
        arrays[one.name] = array
    return arrays, tuple(sizes[axis] for axis in signature.axes)


def _check_dims(one: Input, shape: Sequence[int], sizes: dict[str, int], limits: Mapping[str, int]) -> None:
    if len(shape) != len(one.dims):
        raise InputError(
            f"input {one.name!r} has dims {list(one.dims)} for one item; got shape {list(shape)}: send "
            f"{len(one.dims)} dims"
        )
    for dim, size in zip(one.dims, shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(
                    f"input {one.name!r} has dims {list(one.dims)}; got shape {list(shape)}, where {size} "
                    f"must be {dim}"
                )
            continue
        if size == 0:
            raise InputError(
                f"axis {dim!r} must not be empty; input {one.name!r} has shape {list(shape)}: send at least 1"
            )
        if size > limits[dim]:
            raise ItemTooLarge(
                f"axis {dim!r} is limited to {limits[dim]}; input {one.name!r} has {size}: send at most "
                f"{limits[dim]}, or raise the limit of the servable"
            )
        if sizes.setdefault(dim, size) != size:
            raise InputError(
                f"all inputs of an item share the size of axis {dim!r}, here {sizes[dim]}; input "
                f"{one.name!r} has {size}: make them equal"
            )


def cast_exact(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Bring a value to a dtype if nothing is lost (wider integers in range, wider floats rounded).

    Raises:
        InputError: if it is no array, or the cast would change the values' meaning.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"input {name!r} must be a rectangular array: {error}") from None
    if array.dtype == dtype:
        return array
    if array.dtype == object or array.dtype.kind in "USMm":
        raise InputError(f"input {name!r} has dtype {dtype}; got {array.dtype}: send numbers")
    if dtype.kind in "iu" and array.dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if array.size and not (bounds.min <= array.min() and array.max() <= bounds.max):
            raise InputError(
                f"input {name!r} has dtype {dtype}, {bounds.min} to {bounds.max}; got {array.dtype} values "
                f"from {array.min()} to {array.max()}: send values in range"
            )
        return array.astype(dtype)
    # A float dtype takes any number; ml_dtypes' floats have kind "V" or "f" by version, never "iub".
    if dtype.kind not in "iub" and array.dtype.kind != "c":
        return array.astype(dtype)
    raise InputError(f"input {name!r} has dtype {dtype}; got {array.dtype}: cast it before sending")
