"""Which arguments a traced function really needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.jit_cache.prune import constants, live_arguments, over_live

VECTOR = jax.ShapeDtypeStruct((3,), np.float32)


def traced(function, count=3):
    return jax.jit(lambda *args: jax.tree.leaves(function(*args))).trace(*[VECTOR] * count).jaxpr


def swap(carry, _):
    """Argument c matters only through the turn after the next."""
    _, b, c = carry
    return (b, c, c), None


def count_up(a, b):
    return jax.lax.while_loop(lambda s: s[0][0] < 3, lambda s: (s[0] + s[1], s[1]), (a, b))


@jax.custom_jvp
def first(a, b):
    return a


first.defjvp(lambda primals, tangents: (first(*primals), tangents[0]))

MODELS = {
    "all": (lambda a, b, c: a + b * c, [1, 1, 1]),
    "none": (lambda a, b, c: jnp.ones(3), [0, 0, 0]),
    "one": (lambda a, b, c: b, [0, 1, 0]),
    "read and dropped": (lambda a, b, c: (a + c, b)[1], [0, 1, 0]),
    "nested": (lambda a, b, c: jax.jit(lambda x, y: (x, y * 2))(a, b)[1], [0, 1, 0]),
    "nested twice": (lambda a, b, c: jax.jit(jax.jit(lambda x, y: x))(c, a), [0, 0, 1]),
    "remat": (lambda a, b, c: jax.checkpoint(lambda x, y: jnp.sin(x))(a, b), [1, 0, 0]),
    "custom": (lambda a, b, c: first(c, a), [0, 0, 1]),
    "scan": (lambda a, b, c: jax.lax.scan(swap, (a, b, c), None, length=2)[0][0], [1, 1, 1]),
    "cond": (lambda a, b, c: jax.lax.cond(a[0] > 0, lambda x, y: x, lambda x, y: y, b, c), [1, 1, 1]),
    "while": (lambda a, b, c: count_up(a, b)[0], [1, 1, 0]),
    "effect": (lambda a, b, c: (jax.debug.callback(lambda x: None, a), c)[1], [1, 0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_liveness(name):
    function, wanted = MODELS[name]
    assert live_arguments(traced(function)) == [bool(one) for one in wanted]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "none"])
def test_the_pruned_function_equals_the_whole(name):
    function, _ = MODELS[name]
    args = [
        np.array([0.5, 2, 1], np.float32),
        np.array([1, 5, 2], np.float32),
        np.array([3, 4, 7], np.float32),
    ]
    closed = traced(function)
    live = live_arguments(closed)
    got = jax.jit(over_live(closed, live))(*(arg for arg, used in zip(args, live, strict=True) if used))
    for one, wanted in zip(got, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_array_equal(one, wanted)


steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=8)


@settings(max_examples=20, deadline=None)
@given(steps=steps, returned=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_a_dead_argument_never_matters(steps, returned):
    """Random straight-line programs, some steps in nested calls that read more than they use."""

    def function(*args):
        values = list(args)
        for left, right, nested in steps:
            a, b = values[left % len(values)], values[right % len(values)]
            values.append(jax.jit(lambda x, y: x + 1)(a, b) if nested else a * b)
        return [values[index % len(values)] for index in returned]

    closed = traced(function, 5)
    live = live_arguments(closed)
    args = [np.full(3, number, np.float32) for number in (2, 3, 5, 7, 11)]
    wanted = jax.jit(function)(*args)
    got = jax.jit(over_live(closed, live))(*(arg for arg, used in zip(args, live, strict=True) if used))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    # JAX's own pruning names the same arguments.
    shardings = jax.jit(function).lower(*[VECTOR] * 5).compile().input_shardings[0]
    assert live == [one is not None for one in shardings]


WEIGHT = np.ones((3, 3), np.float32)


@pytest.mark.parametrize("weight", [WEIGHT, jnp.asarray(WEIGHT)], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    "function",
    [
        lambda w: lambda x: x @ w,
        lambda w: jax.jit(lambda x: x @ w),
        lambda w: lambda x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0],
        lambda w: lambda x: jax.lax.cond(x[0] > 0, lambda y: y @ w, lambda y: y, x),
        lambda w: jax.checkpoint(lambda x: x @ w),
        lambda w: lambda x: jax.jit(lambda y: y @ w)(x) + x @ w,
    ],
)
def test_arrays_that_are_closed_over_are_found_once(function, weight):
    found = constants(traced(function(weight), 1))
    assert [one.shape for one in found if one.size > 1] == [(3, 3)]
