"""MiniLM for the experiments: the model, a servable of it, and token ids of the packaged texts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..bucketing import Grid
from ..jit_cache import Servable
from ..models.registry import TextModel, load
from .errors import ExperimentError


def load_minilm() -> TextModel:
    """all-MiniLM-L6-v2.

    Raises:
        ExperimentError: if that name stands for another kind of model.
    """
    model = load("minilm")
    if not isinstance(model, TextModel):
        raise ExperimentError(f"minilm is an embedding model; got {type(model).__name__}.")
    return model


def minilm_servable(grid: Grid | None = None, *, sizes: str = "static") -> Servable:
    """MiniLM as a servable, over a grid of batch and length; without one, over the default grid."""
    model = load_minilm()
    limits = model.limits if grid is None else grid.limits
    return Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits=limits,
        grid=grid,
        name="minilm",
        sizes=sizes,
    )


def token_ids(texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """int32 `(tokens,)` of each text, special tokens included, cut at the model's limit."""
    tokenizer = load_minilm().tokenizer
    return [tokenizer.truncate(one) for one in tokenizer.encode(list(texts))]
