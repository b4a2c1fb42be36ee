"""Servables over several virtual CPU devices; run as a script, one JSON object on stdout."""

import json
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from servax.jit_cache import Placement, Servable, compile_log, compile_program
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.hosting.programs import Programs

RNG = np.random.default_rng(0)
WEIGHTS = {
    "in": RNG.normal(size=(16, 32)).astype(np.float32),
    "out": RNG.normal(size=(32, 8)).astype(np.float32),
}


def apply(params, *, x, scale):
    hidden = jnp.tanh(jnp.einsum("blf,fh->blh", x, params["in"]) * scale[:, None, None])
    return jnp.einsum("blh,ho->blo", hidden, params["out"])


def servable(devices, name="model"):
    placement = None
    if devices is not None:
        mesh = Mesh(np.array(devices).reshape(2, -1), ("data", "model"))
        params = {"in": P(None, "model"), "out": P("model", None)}
        placement = Placement(mesh, params, {"x": P("data")})
    return Servable(
        apply,
        dict(WEIGHTS),
        inputs={"x": "float32[length, 16]", "scale": "float32[]"},
        limits={"batch": 4, "length": 16},
        scheme={"batch": [1, 4], "length": [8, 16]},
        name=name,
        placement=placement,
    )


def items():
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(length, 16)).astype(np.float32), "scale": np.float32(scale)}
        for length, scale in ((3, 1.0), (16, 0.5), (8, 2.0), (5, 1.0), (9, -1.0))
    ]


def answers(devices, folder=None, home=None):
    """Answers of all items, together and alone, and what the store did."""
    store = None if folder is None else Store.open(folder, home=home)
    one = servable(devices)
    with Server(one, store=store, programs=Programs(check_padding=folder is None)) as server:
        got = server.map(items()) + [server(**item) for item in items()]
        leaf = one.leaves[0]
        split = sorted(device.id for device in leaf.sharding.device_set)
        shard = list(leaf.addressable_shards[0].data.shape)
    counts = None if store is None else [store.report().loaded, store.report().compiled]
    return got, {"store": counts, "devices": split, "shard": shard}


def difference(got, wanted):
    return max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))


def forms(devices):
    """One value in every form and place; how many compiles that took."""
    one = servable(devices)
    mesh = one.placement.mesh
    x = items()[1]["x"]
    on_host = {"x": x, "scale": np.float32(2.0)}
    with Server(one) as server:
        wanted = server(**on_host)
        values = [
            jnp.asarray(x),
            jax.device_put(x, devices[-1]),
            jax.device_put(x, NamedSharding(mesh, P("data"))),
            jax.device_put(x, NamedSharding(mesh, P("data", None))),
            jax.device_put(x, NamedSharding(mesh, P("data", "model"))),
        ]
        scales = [2.0, np.float32(2.0), jnp.float32(2.0), jax.device_put(np.float32(2.0), devices[1])]
        before = compile_log().total()[1]
        got = [server(x=one, scale=scale) for one in values for scale in scales]
        return {
            "compiles": compile_log().total()[1] - before,
            "same": all(np.array_equal(one, wanted) for one in got),
        }


def two_threads(devices):
    """Two programs with collectives on the same devices, launched from two threads 200 times each."""
    programs = []
    for name in ("a", "b"):
        one = servable(devices, name)
        bucket = one.grid.buckets[-1]
        programs.append(compile_program(one, bucket, one.place()))
    inputs = {"x": np.ones((4, 16, 16), np.float32), "scale": np.ones(4, np.float32)}
    wanted = [np.asarray(program(inputs)[0]) for program in programs]
    good = [0, 0]

    def launch(which):
        for _ in range(200):
            good[which] += np.array_equal(np.asarray(programs[which](inputs)[0]), wanted[which])

    threads = [threading.Thread(target=launch, args=(which,), daemon=True) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return {"good": good, "hung": any(thread.is_alive() for thread in threads)}


def main(folder):
    devices = jax.devices()
    home = folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    plain, _ = answers(None)
    found = {"count": len(devices)}
    for name, subset in (
        ("all", devices),
        ("first", devices[:4]),
        ("again", devices[:4]),
        ("last", devices[4:]),
    ):
        got, told = answers(subset, folder / "store", home)
        found[name] = told | {"difference": difference(got, plain)}
    found["unstored"] = {"difference": difference(answers(devices[:4])[0], plain)}
    found["forms"] = forms(devices[:4])
    found["threads"] = two_threads(devices[:4])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
