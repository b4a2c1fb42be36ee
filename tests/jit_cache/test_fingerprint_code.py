"""The digest of code: what changes it, and what may not."""

import functools
import os
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache.store import digest_of


def digest(value):
    return digest_of(value).digest


def define(source, name="f", **scope):
    """A function from source text, as if from a module of the user's own."""
    space = {"__name__": "user_module", "jnp": jnp, "np": np, "jax": jax, **scope}
    exec(textwrap.dedent(source), space)
    return space[name]


BASE = """
    SCALE = 2.0
    TABLE = {"a": 1, "b": 2}
    def helper(x):
        return x * SCALE
    def f(x, *, flag=True):
        "Say what it does."
        y = helper(x) + 0.5  # a comment
        return jnp.tanh(y) if flag else TABLE["a"]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("helper", "assistant"),
        ('"a": 1, "b": 2', '"b": 2, "a": 1'),
        ("Say what it does.", "Say it in other words."),
        ("# a comment", ""),
        ("y = helper(x) + 0.5", "\n        y = helper(x) + 0.5"),
        ("y", "z"),
    ],
)
def test_S6_names_order_and_comments_change_nothing(old, new):
    assert digest(define(BASE)) == digest(define(BASE.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5", "0.25"),
        ("0.5", "1"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("SCALE = 2.0", "SCALE = 2"),
        ('"a": 1', '"a": 3'),
        ("x * SCALE", "x + SCALE"),
        ("jnp.tanh", "jnp.sinh"),
        ("flag=True", "flag=False"),
        ("flag", "other"),
        ('TABLE["a"]', 'TABLE["b"]'),
        ("helper(x) + 0.5", "helper(x) - 0.5"),
    ],
)
def test_S6_one_change_in_the_code_changes_the_digest(old, new):
    assert digest(define(BASE)) != digest(define(BASE.replace(old, new)))


def test_S6_the_function_itself_may_be_renamed_and_moved():
    renamed = BASE.replace("def f(", "def g(")
    assert digest(define(BASE)) == digest(define("\n\n\n" + renamed, "g", __name__="elsewhere"))
    recursive = "def f(n):\n    return n if n < 1 else f(n - 1)"
    assert digest(define(recursive)) == digest(define(recursive.replace("f(", "g("), "g"))


def test_S6_a_callback_at_another_address_is_the_same():
    def make():
        def callback(value):
            return value * 2

        return lambda x: jax.pure_callback(callback, x, x)

    first, second = make(), make()
    assert first.__closure__[0].cell_contents is not second.__closure__[0].cell_contents
    assert digest(first) == digest(second)


def test_mutual_recursion_does_not_depend_on_where_one_enters_it():
    source = """
        def even(n):
            return n == 0 or odd(n - 1)
        def odd(n):
            return n != 0 and even(n - 1)
        PARTS = set()
        def f(n):
            return [one(n) for one in PARTS]
    """
    # Sets have the order of addresses: of several, some enter at the one and some at the other.
    one, two, *others = made = [define(source) for _ in range(8)]
    for function in made:
        space = function.__globals__
        space["PARTS"].update((space["even"], space["odd"]))
    assert all(digest(one) == digest(other) for other in others)
    assert digest(one) == digest(two)
    assert digest(one) != digest(define(source.replace("n != 0", "n > 0")))


def test_which_of_two_functions_is_called_first_matters():
    source = """
        def a(x):
            return x + 1
        def b(x):
            return x * 2
        def f(x):
            return a(b(x))
    """
    assert digest(define(source)) != digest(define(source.replace("a(b(x))", "b(a(x))")))


def test_closures_defaults_partials_and_methods_count():
    def closing(value):
        return lambda x: x + value

    assert digest(closing(1)) == digest(closing(1))
    assert digest(closing(1)) != digest(closing(2))
    assert digest(closing(1)) != digest(closing(1.0))
    assert digest(closing(True)) != digest(closing(1))
    assert digest(functools.partial(max, 1)) != digest(functools.partial(max, 2))
    assert digest([].append) != digest([1].append)


def test_wrappers_are_seen_through():
    one, two = define("def f(x):\n    return x + 1"), define("def f(x):\n    return x + 2")
    for wrap in (jax.jit, jax.vmap, jax.checkpoint, functools.lru_cache, jax.custom_jvp, jax.grad):
        assert digest(wrap(one)) == digest(wrap(one))
        assert digest(wrap(one)) != digest(wrap(two)), wrap


def test_library_functions_enter_by_release(monkeypatch):
    from servax.jit_cache.store import library

    before = digest(jnp.tanh)
    assert library.owner("jax.numpy").startswith(f"jax=={jax.__version__}+")
    assert library.owner("os.path") == f"python=={sys.version_info.major}.{sys.version_info.minor}"
    assert library.owner("servax.jit_cache") is None or "site-packages" in library.__file__
    assert library.owner("__main__") is None
    monkeypatch.setattr(library, "_distribution", lambda top: "jax==0.0.1")
    library._owner.cache_clear()
    assert digest(jnp.tanh) != before
    library._owner.cache_clear()


def test_modules_of_the_user_count_as_far_as_they_are_used():
    def module(**content):
        made = types.ModuleType("user_helpers")
        vars(made).update(content)
        return made

    source = "def f(x):\n    return helpers.scale(x) + helpers.BIAS"
    scale = define("def f(x):\n    return 2 * x")
    base = digest(define(source, helpers=module(scale=scale, BIAS=1, unused=1)))
    assert base == digest(define(source, helpers=module(scale=scale, BIAS=1, unused=2)))
    assert base != digest(define(source, helpers=module(scale=scale, BIAS=2, unused=1)))
    looking = source.replace("helpers.BIAS", "getattr(helpers, 'unus' + 'ed')")
    one = digest(define(looking, helpers=module(scale=scale, unused=1)))
    assert one != digest(define(looking, helpers=module(scale=scale, unused=2)))


def test_modules_that_import_each_other_end():
    a, b = types.ModuleType("user_a"), types.ModuleType("user_b")
    a.b, b.a, a.value = b, a, 1
    source = "def f(x):\n    return a.b.a.b.value"
    b.value = 2
    one = digest(define(source, a=a))
    b.value = 3
    assert digest(define(source, a=a)) != one


def test_imports_inside_functions_count(tmp_path, monkeypatch):
    source = "def f(x):\n    import user_inner\n    return user_inner.BIAS + x"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "user_inner.py").write_text("BIAS = 1")
    one = digest(define(source))
    import user_inner

    user_inner.BIAS = 2
    assert digest(define(source)) != one
    del sys.modules["user_inner"]
    assert digest(define("def f(x):\n    import not_there\n    return x")) != one


_SCRIPT = """
    import jax, jax.numpy as jnp
    from servax.jit_cache.store import Fingerprinter
    SETTINGS = {"a": {1, "x", 2.5}, "b": frozenset(["p", "q", "r"])}
    class Block:
        scale = 3
        def __call__(self, x):
            return super().__init__() or x * self.scale
    def model(params, x):
        return Block()(x) @ params["w"] + SETTINGS["a"]
    params = {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}
    print(Fingerprinter(model, params=params).at({"x": jax.ShapeDtypeStruct((2, 4), "float32")}).digest)
"""


def test_S6_two_processes_give_one_key_and_a_change_gives_another(tmp_path):
    def start(seed, *changes):
        text = textwrap.dedent(_SCRIPT)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"script{seed}.py"
        path.write_text(text)
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "HOSTNAME": f"host{seed}"}
        command = [sys.executable, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    base = start(1)
    swapped = ('{"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}', '{"b": jnp.ones(4), "w": jnp.ones((4, 4))}')
    assert start(2, ("def model", "def other"), ("(model", "(other"), swapped) == base
    assert start(3, ("scale = 3", "scale = 4")) != base


def test_a_library_that_is_not_imported_yet_is_a_library():
    from servax.jit_cache.store import library

    name = "iniconfig"  # comes with pytest, and only its plugin code may have imported it
    loaded = {key: sys.modules.pop(key) for key in list(sys.modules) if key.split(".")[0] == name}
    try:
        assert library.owner(name).startswith("iniconfig==")
        assert name not in sys.modules
    finally:
        sys.modules.update(loaded)


def test_what_a_nested_jit_was_told_counts():
    def f(x, n):
        return x**n

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    told = [
        {"static_argnums": 1},
        {"donate_argnums": 0},
        {"out_shardings": jax.NamedSharding(mesh, jax.P())},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ]
    digests = [digest(jax.jit(f, **one)) for one in ({}, *told)]
    assert len(set(digests)) == len(digests)
    assert digests == [digest(jax.jit(f, **one)) for one in ({}, *told)]
    assert digest(jax.jit(f, static_argnames="n")) == digests[1]
    assert digest(jax.jit(f, inline=True)) == digests[0]  # it changes no result
    used = jax.jit(f, **told[0])
    used(1.0, 2)
    assert digest(used) == digests[1]


def test_a_linen_module_is_what_it_was_before_others_were_made():
    from flax import linen

    class Model(linen.Module):
        width: int = 4

        @linen.compact
        def __call__(self, x):
            return linen.Dense(self.width)(x)

    first, second = Model(), Model()
    assert digest(first.apply) == digest(second.apply) != digest(Model(width=5).apply)
