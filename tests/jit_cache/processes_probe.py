"""One of two processes of `jax.distributed` with two CPU devices each: prints what it found, as JSON.

python processes_probe.py NUMBER FOLDER COORDINATOR_PORT LEADER_PORT
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from servax.bucketing import Grid
from servax.jit_cache import Hosts, PackedServable, Placement, Servable, SignatureError, follow
from servax.jit_cache.replicas import devices_each
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.faults import FaultPolicy
from servax.server.hosting.programs import Programs
from toy_layers import SEGMENTS, WEIGHTS, items_of, packed, padded

ITEMS = items_of(*(1, 3, 8, 5, 2, 7, 4, 6) * 5)


def servable(name, placement=None, **options):
    return Servable(
        padded,
        dict(WEIGHTS),
        inputs={"x": "float32[length, 4]", "mask": "mask[length]"},
        grid=Grid.parse("1x8,2x8,4x8", ("batch", "length")),
        name=name,
        placement=placement,
        **options,
    )


def spread(hosts, model_axis=2):
    mesh = Mesh(np.array(jax.devices()).reshape(model_axis, -1), ("model", "data"))
    specs = {"in": P(None, "model"), "out": P("model", None)}
    return Placement(mesh, specs, {"x": P("data")}, hosts=hosts)


def ask(server, name):
    futures = [server.model(name).run_threaded([item]) for item in ITEMS]
    return [row for future in futures for row in future.result(60)]


def difference(got, wanted):
    pairs = [pair for mine, other in zip(got, wanted, strict=True) for pair in zip(mine, other, strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def alone(folder):
    """Each process serves its own devices, from a store that they share."""
    found = {}
    for start in ("first", "again"):
        store = Store.open(folder / "store", home=folder / "home")
        with Server(servable("alone"), devices=jax.local_devices(), store=store) as server:
            answers = ask(server, "alone")
        found[start] = [store.report().loaded, store.report().compiled]
    return answers, found


def refused(hosts):
    """What is refused where a mesh spans processes."""
    spanning = servable("other", spread(hosts))
    tries = {
        "without hosts": lambda: Placement(Mesh(np.array(jax.devices()), ("model",))),
        "a part of them": lambda: Placement(Mesh(np.array(jax.devices()[1:3]), ("model",))),
        "switched": lambda: servable("other", spread(hosts), sizes="switched"),
        "copies": lambda: devices_each([spanning]),
        "leader": lambda: follow(servable("other")),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = ""
        except SignatureError as error:
            found[name] = str(error)
    return found


def lead(models, wanted):
    checks, found = Programs(check_padding=True), {}
    later = servable("padded", models[0].placement, version="2")
    faults = FaultPolicy(retries=0, open_after=1, backoff_s=30.0, most_backoff_s=60.0)
    with Server(*models, programs=checks, seal=True, faults=faults) as server:
        for model in models:
            found[model.name] = difference(ask(server, model.name), wanted)
        try:
            server.replace(later, timeout_s=30)
        except Exception as error:
            found["replaced"] = str(error)
        found["after"] = difference(ask(server, "padded"), wanted)
        models[0].hosts.close()
        try:
            ask(server, "padded")
        except Exception as error:
            found["alone"] = f"{type(error).__name__}: {error}"
        found["ready"] = server.ready
    return found


def main(number, folder, coordinator, leader):
    jax.distributed.initialize(f"127.0.0.1:{coordinator}", 2, number)
    hosts = Hosts(("127.0.0.1", leader), b"known to both of them", wait_s=60)
    wanted, found = alone(folder)
    found = {"own": found, "refused": refused(hosts)}
    models = [
        servable("padded", spread(hosts)),
        PackedServable(servable("packed", spread(hosts, 4)), packed, max_segments=SEGMENTS),
    ]
    if number == 0:
        found |= lead(models, wanted)
    else:
        try:
            Server(models[0]).start().wait_ready(60)
        except Exception as error:
            found["served"] = f"{type(error).__name__}: {error}"
        follow(*models)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
