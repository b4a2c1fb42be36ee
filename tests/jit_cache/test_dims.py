"""Dims as expressions: what JAX prints is evaluated as JAX means it."""

import operator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from servax.jit_cache import SignatureError
from servax.jit_cache.dims import compile_dim, evaluate_dim, names_in

AXES = ("batch", "length", "height")
SYMBOLS = dict(zip(AXES, export.symbolic_shape(", ".join(AXES)), strict=True))
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "max": lambda a, b: jax.core.max_dim(a, b),
    "min": lambda a, b: jax.core.min_dim(a, b),
}

numbers = st.integers(-20, 20)
leaves = st.one_of(st.sampled_from(AXES), numbers)


def grow(inner):
    return st.one_of(
        st.tuples(st.sampled_from(list(BINARY)), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 9)),
        st.tuples(st.just("**"), inner, st.integers(0, 3)),
        st.tuples(st.just("neg"), inner, st.just(0)),
    )


trees = st.recursive(leaves, grow, max_leaves=6)


def build(tree, sizes):
    """The tree as JAX computes it, of symbols or of integers."""
    if isinstance(tree, str):
        return sizes[tree]
    if isinstance(tree, int):
        return tree
    kind, left, right = tree
    a, b = build(left, sizes), build(right, sizes)
    if kind == "neg":
        return -a
    if kind in ("//", "%", "**"):
        return {"//": operator.floordiv, "%": operator.mod, "**": operator.pow}[kind](a, b)
    return BINARY[kind](a, b)


@settings(deadline=None)
@given(tree=trees, sizes=st.tuples(*[st.integers(1, 50)] * 3))
def test_a_printed_dim_evaluates_as_jax_does(tree, sizes):
    by_name = dict(zip(AXES, sizes, strict=True))
    symbolic = build(tree, SYMBOLS)
    printed = str(symbolic)
    assert evaluate_dim(printed, by_name) == int(build(tree, by_name)), printed
    assert names_in(printed) <= set(AXES)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("5", 5),
        ("length", 7),
        ("2*length - 1", 13),
        ("- length + 9", 2),
        ("height*length^3", 1029),
        ("length^2 + 1", 50),
        ("- floordiv(- length, 2)", 4),
        ("mod(- length + 7, 4)", 0),
        ("max(length, height)", 7),
        ("min(length, 5)", 5),
        ("(length + 1) // 2", 4),
        ("length % 4", 3),
        ("length**2", 49),
        (" length ", 7),
    ],
)
def test_the_grammar(expression, value):
    assert evaluate_dim(expression, {"length": 7, "height": 3}) == value
    assert compile_dim(expression, ("height", "length"))((3, 7)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "width", "length +", "f(length)", "max(length)", "max(length, height, 1)", "max(length, height=1)",
     "length.real", "length[0]", "'a'", "1.5", "True", "length if length else 1", "__import__('os')",
     "max(*length)", "length << 1", "~length", "+", "length, height"],
)  # fmt: skip
def test_nothing_else_is_evaluated(expression):
    with pytest.raises(SignatureError, match="an output dim is an expression"):
        evaluate_dim(expression, {"length": 7, "height": 3})


@given(st.text(alphabet="length*+-^() ,0123456789maxfloordiv_.", max_size=20))
def test_any_text_is_evaluated_or_refused(text):
    try:
        compile_dim(text, AXES)
    except SignatureError:
        return


def test_names_of_an_expression():
    assert names_in("2*batch + floordiv(length, 2)") == {"batch", "length"}
    assert names_in("batches") == {"batches"}
    assert names_in("7") == set()


def test_sizes_may_be_any_sequence():
    assert compile_dim("length*height", ("length", "height"))(np.array([3, 4])) == 12
