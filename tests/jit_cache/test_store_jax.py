"""Real executables: bytes and back, in this process, in fresh ones, on other devices."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.jit_cache.errors import NotStorable, OtherDevices
from servax.jit_cache.store import Fingerprinter, Store, load_or_compile, run_trial, serialize, trial


def compiled(function, *shapes):
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*abstract).compile()


def fresh(script, *arguments, **environment):
    """Run a script in a new process; what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_round_trip_is_bitwise():
    program = compiled(lambda w, x: {"y": jnp.tanh(x @ w)}, (8, 8), (4, 8))
    payload, facts = serialize.dump(program)
    w, x = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    again = serialize.load(payload)
    assert facts == {"targets": []}
    np.testing.assert_array_equal(again(w, x[:4])["y"], program(w, x[:4])["y"])


def test_a_program_is_loaded_for_devices_of_this_process(monkeypatch):
    bundle = pickle.loads(serialize.dump(compiled(lambda x: x + 1, (2,)))[0])
    # A store that processes share has programs of devices that are theirs.
    local, theirs = jax.local_devices(), SimpleNamespace(id=1 << 17, platform="cpu", process_index=1)
    monkeypatch.setattr(jax, "devices", lambda *_: [*local, theirs])
    with monkeypatch.context() as patch:
        patch.setattr(serialize.relocate, "load_for", lambda _program, _trees, ids, on: (ids, on))
        assert serialize.load(pickle.dumps(bundle | {"ids": [theirs.id]})) == ([theirs.id], local[:1])


def test_what_calls_back_into_python_is_not_storable():
    def calls_back(x):
        return jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(NotStorable, match=r"calls back into Python.*compiled at each start"):
        serialize.dump(compiled(calls_back, (2,)))


class Strange:
    def __init__(self, value):
        self.value = value


def test_an_output_tree_that_cannot_be_written_down_is_not_storable():
    class Local(Strange):
        pass

    jax.tree_util.register_pytree_node(
        Local, lambda one: ([one.value], None), lambda _, leaves: Local(*leaves)
    )
    with pytest.raises(NotStorable, match="holds no Python objects"):
        serialize.dump(compiled(Local, (2,)))


_INVERSE = """
    import sys, json
    import jax, jax.numpy as jnp, numpy as np
    from servax.jit_cache.store import Fingerprinter, Store, load_or_compile

    def inverse(x):
        return jnp.linalg.inv(x)

    abstract = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    store = Store.open(sys.argv[1] + "/store", home=__import__("pathlib").Path(sys.argv[1]) / "home")
    made = load_or_compile(
        store, Fingerprinter(inverse).at(abstract), lambda: jax.jit(inverse).lower(abstract).compile()
    )
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    error = float(np.abs(np.asarray(made.executable(x)) @ x - np.eye(4)).max())
    print(json.dumps([made.source, made.facts["targets"], error, store.report().warnings]))
"""


def test_S3_a_matrix_inverse_runs_in_a_new_process(tmp_path):
    source, targets, error, warnings = fresh(_INVERSE, tmp_path)
    assert source == "compiled"
    assert any(name.startswith("lapack_") for name in targets)
    assert error < 1e-4
    assert len(list((tmp_path / "home" / "trusted").iterdir())) == 1  # tried in a child of its own
    source, _, error, warnings = fresh(_INVERSE, tmp_path)
    assert (source, warnings) == ("store", [])
    assert error < 1e-4


_SUBSET = """
    import sys, json, pathlib
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from servax.jit_cache.store import Fingerprinter, Store, load_or_compile

    root = pathlib.Path(sys.argv[1])
    x = np.arange(32, dtype=np.float32).reshape(4, 8)

    def double(w, x):
        return x @ w

    def replica(devices):
        mesh = jax.make_mesh((2,), ("d",), devices=devices)
        rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
        w = jax.device_put(2 * np.eye(8, dtype=np.float32), whole)
        abstract = [jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)]
        store = Store.open(root / "store", home=root / "home", trial=None)
        key = Fingerprinter(double, devices=devices, shardings=(whole, rows)).at(abstract)
        jitted = jax.jit(double, in_shardings=(whole, rows), out_shardings=rows)
        made = load_or_compile(store, key, lambda: jitted.lower(*abstract).compile(), devices=devices)
        y = made.executable(w, jax.device_put(x, rows))
        where = sorted(device.id for device in y.devices())
        return made.source, where, bool((np.asarray(y) == 2 * x).all())

    first, second = jax.devices()[:2], jax.devices()[2:]
    print(json.dumps([replica(first), replica(second), replica(first), replica(second)]))
"""


def test_S9_replicas_on_other_devices_load_the_program_of_the_first_and_run_there(tmp_path):
    done = fresh(_SUBSET, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done == [
        ["compiled", [0, 1], True],
        ["store", [2, 3], True],
        ["store", [0, 1], True],
        ["store", [2, 3], True],
    ]


def test_S9_a_program_of_more_devices_is_refused_before_xla_sees_it():
    payload, _ = serialize.dump(compiled(lambda x: x + 1, (2,)))
    with pytest.raises(OtherDevices, match=r"compiled for, cpu \[0\]; got \[\]"):
        serialize.load(payload, [])


def test_S2_a_trial_passes_what_works_and_reports_what_does_not():
    payload, _ = serialize.dump(compiled(lambda x: jnp.linalg.inv(x), (4, 4)))
    assert run_trial(payload) == (True, "", True)
    passed, reason, proved = run_trial(payload[: len(payload) // 2])
    assert passed  # an exception is no danger: this process will meet it, too
    assert "a child process could not load it" in reason
    assert not proved


class Deadly:
    def __reduce__(self):
        return (signal.raise_signal, (signal.SIGSEGV,))


def test_S2_a_start_survives_a_program_that_kills_its_process(tmp_path):
    def double(x):
        return 2 * x

    abstract = jax.ShapeDtypeStruct((4,), jnp.float32)
    key = Fingerprinter(double).at(abstract)
    store = Store.open(tmp_path / "store", home=tmp_path / "home")
    store.put(key, pickle.dumps(Deadly()))
    made = load_or_compile(store, key, lambda: jax.jit(double).lower(abstract).compile())
    assert (made.source, made.reason) == ("compiled", "loading it killed a child process with SIGSEGV")
    np.testing.assert_array_equal(made.executable(np.ones(4, np.float32)), 2)
    again = Store.open(tmp_path / "store", home=tmp_path / "home")
    assert load_or_compile(again, key, lambda: None).source == "store"  # the fresh copy passed its trial


def test_S2_a_child_that_dies_of_a_signal_is_a_failed_trial():
    died = trial._judge(-signal.SIGSEGV, b"", b"")
    assert died == (False, "loading it killed a child process with SIGSEGV", True)
    assert not trial._judge(-signal.SIGILL, b"loaded\n", b"").passed
    assert trial._judge(1, b"loaded\n", b"some call failed").passed


def test_S10_a_program_is_small_and_new_weights_keep_it(tmp_path):
    def apply(params, x):
        return x @ params

    abstract = jax.ShapeDtypeStruct((4, 1024), jnp.float32)
    store = Store.open(tmp_path / "store", home=tmp_path / "home", trial=None)

    def start(weights):
        keys = Fingerprinter(apply, params=weights)
        shape = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        return load_or_compile(
            store, keys.at(abstract), lambda: jax.jit(apply).lower(shape, abstract).compile()
        )

    assert start(np.zeros((1024, 1024), np.float32)).source == "compiled"
    assert start(np.ones((1024, 1024), np.float32)).source == "store"
    assert start(np.ones((1024, 512), np.float32)).source == "compiled"
    assert max(one.nbytes for one in store.ls()) < 1_000_000


def test_what_jax_took_from_its_own_cache_is_not_stored(tmp_path):
    store = Store.open(tmp_path / "store", home=tmp_path / "home", trial=None)
    key = Fingerprinter(jnp.tanh).at(jax.ShapeDtypeStruct((2,), jnp.float32))

    def taken():
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compiled(lambda x: jnp.tanh(x), (2,))

    assert "JAX's own cache" in load_or_compile(store, key, taken).reason
    assert store.get(key) is None
    (warned,) = store.report().warnings
    assert "unset JAX_COMPILATION_CACHE_DIR" in warned
    assert load_or_compile(store, key, lambda: compiled(lambda x: jnp.tanh(x), (2,))).source == "compiled"
    assert load_or_compile(store, key, taken).source == "store"
