"""Which layout a text model is served in: texts in rows of their own, or several in a row."""

from functools import partial
from pathlib import PurePath
from typing import Any

from ..bucketing import packed_grid
from ..jit_cache import Servable
from ..jit_cache.packed import PackedServable
from .config import ModelConfig
from .errors import ConfigError

DEFAULT_MAX_BATCH = 32
DEFAULT_SCHEME = "powers_of_two:16"
DEFAULT_SEGMENTS = 16
PACKED_ELEMENTS = 1024


def text_servable(
    model: Any, config: ModelConfig | None = None, *, name: str | None = None, padded: bool = False
) -> Servable:
    """An encoder of texts, as `servax.models.load` gives it, as what a server takes.

    Args:
        model: `servax.models.TextModel`.
        config: its options, of which those for loading are not looked at; None means each one's default.
        name: the name it is served by; None takes the model's own.
        padded: whether, if nothing is asked for, texts get rows of their own.

    Returns:
        A servable whose input `ids` is int32[length] for each text.

    Raises:
        ConfigError: the model is none of texts to vectors, or options contradict each other.
    """
    task = getattr(model, "task", None)
    if task != "embedding":
        got = type(model).__name__ if task is None else f"one of task {task!r}"
        raise ConfigError(
            f"a servable of texts is made of an encoder that `servax.models.load` gave, got {got}; `servax "
            "serve` serves models that generate text, `servax.Servable` describes any function"
        )
    config = ModelConfig() if config is None else config
    name = PurePath(model.name).name if name is None else name
    if _packs(config, padded=padded):
        return _packed(model, config, name)
    return Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits={**model.limits, "batch": config.max_batch or DEFAULT_MAX_BATCH},
        scheme=config.scheme or DEFAULT_SCHEME,
        max_elements=config.max_elements,
        name=name,
        sizes=config.sizes or "static",
    )


def _packs(config: ModelConfig, *, padded: bool) -> bool:
    given = [name for name in ("scheme", "max_batch", "sizes") if getattr(config, name) is not None]
    if config.layout == "packed" and given:
        raise ConfigError(
            f"Packed rows have a grid of their own, got {given[0]} beside layout=packed for "
            f"{config.model!r}; leave one of them out."
        )
    if config.layout is not None:
        return config.layout == "packed"
    return not (padded or given or config.max_elements is not None)


def _packed(model: Any, config: ModelConfig, name: str) -> PackedServable:
    segments = config.max_segments or DEFAULT_SEGMENTS
    longest = model.limits["length"]
    grid = packed_grid(longest, elements=config.max_elements or PACKED_ELEMENTS)
    padded = Servable(model.apply, model.params, inputs=model.inputs, grid=grid, name=name)
    return PackedServable(padded, partial(model.apply_packed, max_segments=segments), max_segments=segments)
