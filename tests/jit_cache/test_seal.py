"""Sealing: nothing is traced any more, except by whoever opens the seal for himself."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache import (
    SealedError,
    explain_sealed,
    open_seal,
    process_sealed,
    seal_process,
    unseal_process,
)

X = np.ones(3, np.float32)


@pytest.fixture
def sealed():
    seal_process()
    yield
    while process_sealed():
        unseal_process()
    assert jax.config.jax_no_tracing is False


@pytest.fixture
def executable():
    return jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), np.float32)).compile()


@pytest.fixture
def warm():
    function = jax.jit(lambda x: x + 1)
    function(X)
    return function


COLD = {
    "jit": lambda: jax.jit(lambda x: x + 2)(X),
    "eager operator": lambda: jnp.asarray(X) * jnp.asarray(X) ** 3.25,
    "eager function": lambda: jnp.linalg.norm(jnp.ones((3, 17))),
    "eval_shape": lambda: jax.eval_shape(lambda x: x + 3, X),
    "lower": lambda: jax.jit(lambda x: x + 4).lower(X),
    "grad": lambda: jax.jit(jax.grad(lambda x: (x * 5).sum()))(X),
}


@pytest.mark.parametrize("name", COLD)
def test_tracing_raises_while_sealed(sealed, name, compiles):
    with pytest.raises(SealedError, match="nothing is traced or compiled after warm-up; the model tried to"):
        with explain_sealed("the model"):
            COLD[name]()
    # A refused attempt counts as a trace in some places and not in others; it never compiles.
    assert compiles.count == 0


@pytest.mark.parametrize("name", COLD)
def test_tracing_works_again_afterwards(name):
    seal_process()
    unseal_process()
    assert not process_sealed()
    COLD[name]()


def test_what_was_compiled_before_still_runs(executable, warm, sealed, compiles):
    with compiles.none():
        np.testing.assert_array_equal(executable(X), X * 2)
        np.testing.assert_array_equal(warm(X), X + 1)
        np.testing.assert_array_equal(jax.device_put(X), X)


def test_a_warm_function_at_a_new_shape_is_cold(warm, sealed):
    with pytest.raises(SealedError, match="tried to trace"), explain_sealed("the model"):
        warm(np.ones(4, np.float32))


def test_other_threads_are_sealed_too(sealed):
    raised = []

    def work():
        try:
            COLD["jit"]()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_the_seal_opens_for_one_thread_only(sealed):
    results = []

    def work():
        with open_seal():
            results.append(COLD["jit"]())
        try:
            jax.jit(lambda x: x + 6)(X)
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=work)
    with open_seal():
        COLD["lower"]()
        thread.start()
        thread.join()
    np.testing.assert_array_equal(results[0], X + 2)
    assert isinstance(results[1], RuntimeError)
    with pytest.raises(RuntimeError):
        COLD["eval_shape"]()


def test_an_open_seal_on_an_unsealed_process_changes_nothing():
    with open_seal():
        COLD["jit"]()
    COLD["lower"]()


def test_seals_nest():
    seal_process()
    seal_process()
    unseal_process()
    assert process_sealed()
    with pytest.raises(RuntimeError, match="no_tracing"):
        COLD["jit"]()
    unseal_process()
    assert not process_sealed()
    COLD["jit"]()


def test_unsealing_what_is_not_sealed_does_nothing():
    unseal_process()
    assert not process_sealed()
    COLD["jit"]()


def test_a_users_own_setting_comes_back():
    jax.config.update("jax_no_tracing", True)
    try:
        seal_process()
        unseal_process()
        assert jax.config.jax_no_tracing is True
    finally:
        jax.config.update("jax_no_tracing", False)


def test_the_error_names_the_function_and_the_remedy(sealed):
    def forgotten(x):
        return x + 1

    with pytest.raises(SealedError, match=r"request 7 tried to trace forgotten at .*--no-seal") as caught:
        with explain_sealed("request 7"):
            jax.jit(forgotten)(X)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_pass_as_they_are(sealed):
    with pytest.raises(RuntimeError, match=r"^device lost$"), explain_sealed("the model"):
        raise RuntimeError("device lost")
    with explain_sealed("the model"):
        pass
