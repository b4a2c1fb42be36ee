"""A Flax NNX module as pure functions of plain nested dicts of parameters."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import jax
from flax import nnx

from .apart import Apart, joined


class Config(Hashable, Protocol):
    """What is asked of a module's sizes and choices."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102


C = TypeVar("C", bound=Config)
M = TypeVar("M", bound=nnx.Module)


class Pure(Generic[C, M]):
    """A kind of module whose layers are stacked.

    Args:
        make: `(config, rngs=...)`: a module of these sizes, with random parameters.
    """

    def __init__(self, make: Callable[..., M]) -> None:
        self._make = make
        self._abstract = functools.lru_cache(maxsize=64)(self._evaluated)

    def abstract(self, config: C) -> tuple[Any, Any]:
        """The module's graph and its parameters' shapes, without allocating any."""
        return self._abstract(config)

    def _evaluated(self, config: C) -> tuple[Any, Any]:
        graph, state = nnx.split(nnx.eval_shape(lambda: self._make(config, rngs=nnx.Rngs(0))))
        return graph, state

    def init(self, config: C, seed: int = 0) -> dict[str, Any]:
        """Random parameters as a plain nested dict of float32 arrays, layers stacked on axis 0."""
        return dict(nnx.to_pure_dict(nnx.split(self._make(config, rngs=nnx.Rngs(seed)))[1]))

    def shapes(self, config: C) -> dict[str, Any]:
        """The same tree as `init` gives, of `jax.ShapeDtypeStruct`."""
        return dict(nnx.to_pure_dict(self.abstract(config)[1]))

    def module(self, config: C, params: Mapping[str, Any]) -> tuple[M, Apart]:
        """The module with these parameters, and the kernels that are not in it."""
        graph, state = self.abstract(config)
        state = jax.tree.map(lambda leaf: leaf, state)
        here, there = joined(params, config.num_layers)
        nnx.replace_by_pure_dict(state, here)
        model: M = nnx.merge(graph, state)
        return model, there
