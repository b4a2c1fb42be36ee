"""`servax.bucketed`: jit that pads instead of recompiling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servax
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.jit_cache import InputError, ItemTooLarge, SignatureError, compile_log

FLOAT = np.float32


def scaled(w: Any, ids: Any, labels: Any, mask: Any) -> dict[str, Any]:
    x = jnp.where(mask, ids, 0.0) * w
    return {"total": x.sum(), "rows": x.sum(1), "all": x, "w": w + 1, "labels": labels}


def make(**options: Any) -> Any:
    return servax.bucketed(
        dims={"ids": "batch, length", "labels": "batch = -1"},
        masks={"mask": "batch, length"},
        limits={"batch": 8, "length": 64},
        scheme="powers_of_two:4",
        **options,
    )(scaled)


SHARED = make()


def test_equal_to_the_plain_function_with_one_compile_for_each_bucket() -> None:
    function = make()
    rng = np.random.default_rng(0)
    for rows in (1, 3, 4, 5, 8):
        for length in (1, 4, 5, 31, 32, 33, 64):
            ids = rng.random((rows, length), FLOAT)
            labels = np.arange(rows, dtype=np.int32)
            got = function(FLOAT(2), ids, labels)
            np.testing.assert_allclose(got["total"], ids.sum() * 2, rtol=1e-5)
            np.testing.assert_allclose(got["rows"], ids.sum(1) * 2, rtol=1e-5)
            np.testing.assert_array_equal(got["all"], ids * 2)
            np.testing.assert_array_equal(got["labels"], labels)
            assert float(got["w"]) == 3
    assert function.compiles == len(function.buckets) == 2 * 4  # batch 4, 8; length 4, 8, 32, 64


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 64)), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_never_more_compiles_than_buckets(shapes: list[tuple[int, int]]) -> None:
    for rows, length in shapes:
        SHARED(FLOAT(2), np.ones((rows, length), FLOAT), np.zeros(rows, np.int32))
    assert SHARED.compiles <= 2 * 5
    assert 0 <= SHARED.waste < 1


def test_a_known_bucket_is_not_compiled_again() -> None:
    function = make()
    function(FLOAT(2), np.ones((3, 9), FLOAT), np.zeros(3, np.int32))
    before = compile_log().total()
    function(FLOAT(3), np.ones((4, 16), FLOAT), np.zeros(4, np.int32))
    assert compile_log().total() == before


def test_outputs_that_do_not_vary_stay_on_the_device() -> None:
    got = make()(FLOAT(2), np.ones((3, 9), FLOAT), np.zeros(3, np.int32))
    assert isinstance(got["w"], jax.Array)
    assert isinstance(got["all"], np.ndarray)


def test_donated_state_goes_round() -> None:
    @servax.bucketed(dims={"x": "batch, length"}, donate=("state",))
    def step(state: Any, x: Any) -> tuple[Any, Any]:
        return state - x.sum(), x.max()

    state = jnp.zeros(())
    for length in range(1, 30):
        state, _ = step(state, np.ones((2, length), FLOAT))
    assert float(state) == -2 * sum(range(1, 30))
    assert step.compiles == 3


def test_static_arguments_and_defaults() -> None:
    @servax.bucketed(dims={"x": "length"}, static=("double",))
    def function(x: Any, double: bool = False) -> Any:
        return x * 2 if double else x

    np.testing.assert_array_equal(function(np.arange(3)), [0, 1, 2])
    np.testing.assert_array_equal(function(np.arange(3), double=True), [0, 2, 4])


def test_inside_grad_it_is_the_plain_function() -> None:
    function = make()
    ids = jnp.ones((3, 5))
    slope = jax.grad(lambda w: function(w, ids, jnp.zeros(3))["total"])(2.0)
    assert float(slope) == 15


def test_bad_input_is_refused() -> None:
    function = make()
    with pytest.raises(ItemTooLarge, match=r"'batch' is limited to 8.*has 9"):
        function(FLOAT(1), np.ones((9, 3), FLOAT), np.zeros(9, np.int32))
    with pytest.raises(InputError, match=r"'ids' has dims \['batch', 'length'\]; got shape \[3\]"):
        function(FLOAT(1), np.ones(3, FLOAT), np.zeros(3, np.int32))
    with pytest.raises(InputError, match=r"'labels'.*must be 3"):
        function(FLOAT(1), np.ones((3, 3), FLOAT), np.zeros(2, np.int32))
    with pytest.raises(InputError, match="at least 1"):
        function(FLOAT(1), np.ones((0, 3), FLOAT), np.zeros(0, np.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"z": "batch"}}, "arguments of plain are"),
        ({"dims": {"x": "3"}}, "at least one argument has a varying axis"),
        ({"dims": {"x": "ba tch"}}, "dims are numbers and axis names"),
        ({"dims": {"x": "batch = one"}}, "a pad value is a number"),
        ({"dims": {"x": "batch"}, "limits": {"length": 3}}, "limits are for the axes"),
        ({"dims": {"x": "batch"}, "masks": {"x": "length"}}, "a mask is over axes"),
    ],
)
def test_bad_declarations_are_refused(options: dict[str, Any], message: str) -> None:
    def plain(x: Any) -> Any:
        return x

    with pytest.raises(SignatureError, match=message):
        servax.bucketed(**options)(plain)


def test_a_function_that_needs_concrete_sizes_is_refused_with_its_reason() -> None:
    @servax.bucketed(dims={"x": "length"})
    def function(x: Any) -> Any:
        return x if int(x.shape[0]) % 2 else x * 2

    with pytest.raises(SignatureError, match="cannot be evaluated so"):
        function(np.ones(3, FLOAT))
