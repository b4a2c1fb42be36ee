"""From the tensors of a request, as either protocol decodes them, to the rows that a model takes."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import BadRequest, BadTensor, TooManyRows
from ..seam import ModelHandle, TensorSpec
from ..text import Cut, Embedder, Side
from .encode import cast, datatype_of
from .kserve_codec import Tensor, flag
from .kserve_schema import Parameters

TEXT = "text"
Rows = list[dict[str, np.ndarray]]


async def rows_of(
    model: ModelHandle,
    front: Embedder | None,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[Rows, list[Cut]]:
    """The rows that a request holds, texts tokenized and what is too long cut where the caller asked.

    Args:
        model: whom the request asks.
        front: its text front; None for a model without a tokenizer.
        parameters: of the request.
        tensors: each input by name, as an array or, for BYTES, strings.
        shapes: the declared shapes by the same names.

    Raises:
        BadRequest: truncating is asked of a model without a tokenizer, or in words that are none.
        BadTensor, TooManyRows: see `split`.
        TooLong: a text has too many tokens.
    """
    truncate, side = truncation(parameters, front)
    if front is None:
        return split(model, tensors, takes_text=False), []
    text = tensors.get(TEXT)
    if isinstance(text, list) and len(tensors) == 1:
        check_text_shape(shapes[TEXT])
        check_row_count(model, len(text))
        check_texts(text)
        prepared = await front.prepare(text, truncate=truncate, truncate_side=side)
        return [{front.input_name: ids} for ids in prepared.ids], prepared.cuts
    rows = split(model, tensors, takes_text=True)
    if not rows:
        return rows, []
    prepared = await front.prepare(
        [row[front.input_name] for row in rows], truncate=truncate, truncate_side=side
    )
    for row, ids in zip(rows, prepared.ids, strict=True):
        row[front.input_name] = ids
    return rows, prepared.cuts


def truncation(parameters: Parameters, front: Embedder | None) -> tuple[bool, Side]:
    """The `truncate` and `truncate_side` parameters; raises `BadRequest` where they mean nothing."""
    if front is None and ("truncate" in parameters or "truncate_side" in parameters):
        raise BadRequest("Truncating needs a model with a tokenizer, got one without; leave `truncate` out.")
    side = parameters.get("truncate_side", "right")
    if side == "right":
        return flag(parameters, "truncate", False), "right"
    if side == "left":
        return flag(parameters, "truncate", False), "left"
    raise BadRequest(f"Parameter 'truncate_side' is 'left' or 'right', got {side!r}; correct it.")


def check_text_shape(shape: Sequence[int]) -> None:
    """Raises `BadTensor` unless texts are [n] or [n, 1]."""
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
        raise BadTensor(f"Input {TEXT!r} has shape [n] or [n, 1], got {list(shape)}; send one text a row.")


def check_texts(texts: Sequence[str]) -> None:
    """Raises `BadTensor` if one of them is empty: a vector of special tokens alone means nothing."""
    if "" in texts:
        raise BadTensor(
            f"A text has at least one character, got an empty one at index {texts.index('')}; leave it out."
        )


def check_row_count(model: ModelHandle, rows: int) -> None:
    """Raises `TooManyRows` before anything is made for each row."""
    if rows > model.max_request_rows:
        raise TooManyRows(
            f"A request to {model.name!r} has at most {model.max_request_rows} rows, got {rows}; "
            "send several requests."
        )


def split(model: ModelHandle, tensors: Mapping[str, Tensor], *, takes_text: bool) -> Rows:
    """Checks tensors against the model's specs, casts them, and cuts them into rows without a copy.

    Raises:
        BadTensor: an input is missing or unknown, or its datatype, rank or size is not the model's.
        TooManyRows: the leading dimension is above the model's limit.
    """
    specs = model.inputs
    if not specs:
        raise BadTensor(
            f"Model {model.name!r} continues texts and takes no tensors, got {sorted(tensors)}; send a "
            f"prompt to /v2/models/{model.name}/generate."
        )
    expected = {spec.name for spec in specs if spec.name in tensors or _needed(spec)}
    if not tensors or tensors.keys() != expected:
        raise _misnamed(model, tensors, takes_text)
    arrays = {spec.name: _checked(spec, tensors[spec.name]) for spec in specs if spec.name in tensors}
    rows = len(next(iter(arrays.values())))
    for array in arrays.values():
        if len(array) != rows:
            counts = {name: len(one) for name, one in arrays.items()}
            raise BadTensor(f"Inputs share their leading dimension, got rows {counts}; send equally many.")
    check_row_count(model, rows)
    return [{name: array[row] for name, array in arrays.items()} for row in range(rows)]


def _needed(spec: TensorSpec) -> bool:
    return not getattr(spec, "optional", False)


def _misnamed(model: ModelHandle, tensors: Mapping[str, Tensor], takes_text: bool) -> BadTensor:
    names = [spec.name for spec in model.inputs]
    expected = f"{names} or {[TEXT]}" if takes_text else f"{names}"
    unknown = next((name for name in tensors if name not in names), None)
    needed = [spec.name for spec in model.inputs if _needed(spec)]
    missing = next((name for name in (*needed, *names) if name not in tensors), None)
    absent = [name for name in needed if name not in tensors]
    if unknown is not None and absent:
        sent = f"{absent[0]!r} is missing, got {unknown!r}; rename it"
        return BadTensor(f"Inputs of {model.name!r} are {expected}: {sent}.")
    if unknown is not None:
        return BadTensor(f"Inputs of {model.name!r} are {expected}, got {unknown!r} too; leave it out.")
    return BadTensor(f"Inputs of {model.name!r} are {expected}, got none named {missing!r}; add it.")


def _checked(spec: TensorSpec, tensor: Tensor) -> np.ndarray:
    if isinstance(tensor, list):
        want = datatype_of(spec.dtype)
        raise BadTensor(f"Input {spec.name!r} of the model is {want}, got BYTES; send {want}.")
    rows, *sizes = tensor.shape or (0,)
    if tensor.ndim != 1 + len(spec.shape):
        raise _misshapen(spec, tensor)
    for size, axis in zip(sizes, spec.shape, strict=True):
        if isinstance(axis, int):
            if size != axis:
                raise _misshapen(spec, tensor)
        elif size == 0 and rows:
            raise BadTensor(
                f"Input {spec.name!r} needs {axis} of at least 1, got {list(tensor.shape)}; send no rows"
                " if there is nothing to run."
            )
    return cast(tensor, spec.dtype, spec.name)


def _misshapen(spec: TensorSpec, tensor: np.ndarray) -> BadTensor:
    shown = ", ".join(map(str, ["rows", *spec.shape]))
    fixed = zip(tensor.shape, spec.shape, strict=False)
    one = tensor.ndim == len(spec.shape) and all(
        size == axis or isinstance(axis, str) for size, axis in fixed
    )
    remedy = f"send {[1, *tensor.shape]} for one item" if one else "reshape it"
    return BadTensor(
        f"Input {spec.name!r} must have the shape [{shown}], got {list(tensor.shape)}; {remedy}."
    )
