"""What a servable takes: dtypes and named dims per item, and the inputs the server makes itself.

The grammar of one declaration, dims being those of ONE item (the server adds the batch dim):

    int32[length]            sent by the caller; the varying axis is called ``length``
    int32[length] = 1        the same, padded with 1 instead of 0
    int32[length]? = 0       may be left out or None: then it is all padding, here zeros
    uint8[height, width, 3]  two varying axes and one fixed dim
    float32[]                a scalar for each item
    mask[length]             made here: bool, true on real elements   -> (batch, length)
    lengths[length]          made here: int32, real size of that axis -> (batch,)
    positions[length]        made here: int32, 0, 1, 2, ...           -> (batch, length)
"""

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ..bucketing import Bucket
from .dtypes import parse_value
from .errors import SignatureError

BATCH = "batch"
Dim = int | str
_DECLARATION = re.compile(
    r"\s*(?P<kind>[a-z0-9_]+)\s*\[(?P<dims>[^\]]*)\]\s*(?P<optional>\?)?\s*(?:=\s*(?P<pad>\S+))?\s*", re.ASCII
)
_NUMBERS = re.compile(r"bool|bfloat16|(u?int|float|complex)[0-9]+[a-z0-9_]*", re.ASCII)
_MADE_DTYPES = {"mask": np.dtype(np.bool_), "lengths": np.dtype(np.int32), "positions": np.dtype(np.int32)}
# Functions of symbolic dims: an axis of that name could not be told from a call.
_RESERVED = {BATCH, "max", "min", "mod", "floordiv"}


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the caller sends with each item.

    Attributes:
        name: keyword of the apply function.
        dtype: NumPy dtype (``ml_dtypes`` types included).
        dims: dims of one item; a ``str`` names a varying axis.
        pad: value written where an item is smaller than its bucket.
        optional: whether callers may leave it out; it is all ``pad`` then.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]
    pad: float | int | bool = 0
    optional: bool = False

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
    for part in (piece.strip() for piece in text.split(",")) if text.strip() else ():
        if part.isascii() and part.isdecimal() and int(part) > 0:
            dims.append(int(part))
        elif part.isascii() and part.isidentifier() and part not in _RESERVED and not keyword.iskeyword(part):
            dims.append(part)
        else:
            raise SignatureError(
                f"a dim is a number from 1 up or the name of an axis (a plain identifier other than "
                f"{sorted(_RESERVED)}; 'batch' is added by the server); input {name!r} has {part!r}: write "
                f"for example 'int32[length]' or 'uint8[height, width, 3]'"
            )
    return tuple(dims)


def _parse_dtype(name: str, kind: str) -> np.dtype[Any]:
    # NumPy reads more than names of numbers ("2f4", "a5", "01"), and warns or raises as it pleases;
    # jax.numpy has a name for every dtype that JAX computes with, and for no other (float128).
    if not _NUMBERS.fullmatch(kind) or not hasattr(jax.numpy, kind):
        raise SignatureError(
            f"a dtype is one that JAX computes with; input {name!r} has {kind!r}: use for example int32, "
            f"float32, bfloat16, or one of {sorted(_MADE_DTYPES)} for an input made by the server"
        )
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise SignatureError(
            f"64-bit types need jax_enable_x64, which is off; input {name!r} has {kind}: declare {narrow} "
            f"(callers may still send {kind} where the values fit) or switch x64 on at the start"
        )
    return dtype


def _parse_pad(name: str, dtype: np.dtype[Any], text: str) -> float | int | bool:
    value = parse_value(text, dtype)
    if value is None:
        raise SignatureError(
            f"a pad value must be one that {dtype} holds; input {name!r} has {text!r}: write '= 1', say"
        )
    return value


def parse_input(name: str, declaration: str) -> Input | Made:
    """Read one declaration of the grammar above.

    Raises:
        SignatureError: if it does not follow the grammar.
    """
    if not str(name).isidentifier():
        raise SignatureError(
            f"an input's name is a keyword of the apply function, so it must be an identifier; got {name!r}"
        )
    match = _DECLARATION.fullmatch(str(declaration))
    if match is None:
        raise SignatureError(
            f"an input is declared as 'dtype[dims]', dims being those of one item; input {name!r} is "
            f"{declaration!r}: write for example 'int32[length]'"
        )
    kind, dims = match["kind"], _parse_dims(name, match["dims"])
    if kind in _MADE_DTYPES:
        return _parse_made(name, kind, dims, plain=match["pad"] is None and match["optional"] is None)
    dtype = _parse_dtype(name, kind)
    return Input(
        name, dtype, dims, _parse_pad(name, dtype, match["pad"] or "0"), match["optional"] is not None
    )


def _parse_made(name: str, kind: str, dims: tuple[Dim, ...], *, plain: bool) -> Made:
    axes = tuple(dim for dim in dims if isinstance(dim, str))
    if not plain or len(axes) != len(dims) or not axes or (kind != "mask" and len(axes) != 1):
        raise SignatureError(
            f"'{kind}' is made by the server from varying axes only (a mask may name several, the others "
            f"one), takes no pad value and is never optional; input {name!r} has dims {list(dims)}: write "
            f"for example '{kind}[length]'"
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
            SignatureError: on the first declaration that cannot be read, on a made or optional input over
                an axis that no required input has, and if the caller need not send anything.
        """
        parsed = [parse_input(name, text) for name, text in declarations.items()]
        inputs = tuple(one for one in parsed if isinstance(one, Input))
        made = tuple(one for one in parsed if isinstance(one, Made))
        required = [one for one in inputs if not one.optional]
        if not required:
            raise SignatureError(
                f"a servable needs at least one input that the caller must send; got {dict(declarations)}"
            )
        axes = tuple(dict.fromkeys(dim for one in required for dim in one.dims if isinstance(dim, str)))
        signature = cls(inputs, made, axes)
        for one in signature.everything:
            if unknown := [dim for dim in one.dims if isinstance(dim, str) and dim not in axes]:
                raise SignatureError(
                    f"an input that callers may leave out, or that the server makes, speaks of axes of the "
                    f"required inputs, here {list(axes)}; {one.name!r} names {unknown}: correct the name, or "
                    f"declare a required input with that axis"
                )
        return signature

    @property
    def everything(self) -> tuple[Input | Made, ...]:
        """All inputs, sent ones first."""
        return (*self.inputs, *self.made)

    def shape_of(self, one: Input | Made, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Shape of one input, batch first, at given (possibly symbolic) sizes by axis name."""
        if isinstance(one, Made) and one.kind == "lengths":
            return (sizes[BATCH],)
        return (sizes[BATCH], *(sizes[dim] if isinstance(dim, str) else dim for dim in one.dims))

    def abstract(self, sizes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every input, sent and made, at given sizes by axis name."""
        return {
            one.name: jax.ShapeDtypeStruct(self.shape_of(one, sizes), one.dtype) for one in self.everything
        }

    def abstract_at(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every input in a bucket."""
        return self.abstract(dict(zip(bucket.axes, bucket.sizes, strict=True)))

    def item_sizes(self, item: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        """Sizes of one checked item, in the order of ``axes``; see `check_item`."""
        sizes = {
            dim: size
            for one in self.inputs
            for dim, size in zip(one.dims, item[one.name].shape, strict=True)
            if isinstance(dim, str)
        }
        return tuple(sizes[axis] for axis in self.axes)
