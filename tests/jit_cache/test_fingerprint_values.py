"""The digest of what code holds: configurations, arrays, objects, modules of layers."""

import dataclasses
import enum
import functools
import threading
from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from servax.jit_cache.errors import FingerprintError
from servax.jit_cache.store import digest_of


def digest(value):
    return digest_of(value).digest


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3
    _hash: int = dataclasses.field(default=0, repr=False)

    @functools.cached_property
    def derived(self):
        return self.size * 2


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def test_configurations_count_by_content():
    assert digest(Config(3)) == digest(Config(3))
    assert digest(Config(3)) != digest(Config(4))
    used = Config(3, _hash=hash("differs between processes"))
    assert used.derived == 6
    assert digest(used) == digest(Config(3))
    assert digest(Colour.RED) != digest(Colour.BLUE)
    assert digest({"a": 1, "b": [2, {3}]}) == digest({"b": [2, {3}], "a": 1})
    assert digest([1, 2]) != digest([2, 1])
    assert digest({1, 2}) == digest({2, 1})
    assert digest((1,)) != digest([1])
    assert digest(0.0) != digest(-0.0)
    assert digest(OrderedDict(a=1)) != digest(OrderedDict(a=2))
    pair = namedtuple("pair", "x y")
    assert digest(pair(1, 2)) == digest(pair(1, 2)) != digest(pair(2, 1))


def test_arrays_count_by_content_and_are_measured():
    one = np.arange(6, dtype=np.float32)
    assert digest(one) == digest(one.copy()) == digest(jnp.asarray(one))
    assert digest(one) != digest(one.reshape(2, 3))
    assert digest(one) != digest(one.view(np.int32))
    assert digest(np.arange(3)) != digest(np.arange(3)[::-1])
    assert digest_of(lambda x: x + one).array_bytes == 24
    assert digest(jax.random.key(0)) != digest(jax.random.key(1))
    assert digest(jnp.asarray(2.0)) != digest(jnp.float32(2.0))  # the first is weakly typed


def test_the_order_of_what_is_called_counts():
    def one(x):
        return x + 1

    def two(x):
        return x * 2

    assert digest({"a": one, "b": two}) != digest({"b": two, "a": one})


class Scaler:
    def __init__(self, scale):
        self.scale = scale
        self.lock = threading.Lock()

    def __call__(self, x):
        return x * self.scale


def test_callable_objects_count_by_class_and_state():
    assert digest(Scaler(2)) == digest(Scaler(2))
    assert digest(Scaler(2)) != digest(Scaler(3))
    assert digest(Scaler(2).__call__) == digest(Scaler(2).__call__)


def test_what_only_its_address_identifies_is_refused():
    class Opaque:
        __slots__ = ()

    generator = (one for one in [1])
    with pytest.raises(FingerprintError, match=r"described by content.*address.*pass it as an argument"):
        digest(lambda x: generator)
    assert digest(object()) == digest(object())
    assert digest(Opaque()) == digest(Opaque())


def test_flax_modules_count_by_structure_and_code():
    class Model(nnx.Module):
        def __init__(self, size, activation=jax.nn.gelu, *, rngs):
            self.inner = nnx.Linear(4, size, rngs=rngs)
            self.norm = nnx.BatchNorm(size, rngs=rngs)
            self.activation = activation

        def __call__(self, x):
            return self.activation(self.norm(self.inner(x)))

    def apply(model):
        graph, _ = nnx.split(model)
        return lambda params, x: nnx.merge(graph, params)(x)

    base = digest(apply(Model(3, rngs=nnx.Rngs(0))))
    assert base == digest(apply(Model(3, rngs=nnx.Rngs(1))))  # weights are no part of it
    assert base != digest(apply(Model(5, rngs=nnx.Rngs(0))))
    assert base != digest(apply(Model(3, jax.nn.relu, rngs=nnx.Rngs(0))))
    mine = digest(apply(Model(3, lambda x: x * 2, rngs=nnx.Rngs(0))))
    assert mine != digest(apply(Model(3, lambda x: x * 3, rngs=nnx.Rngs(0))))
