"""Run in a process of eight CPU devices: every kind of program on replicas, as JSON.

For each kind the same items are answered on one device, on replicas over a store, on the same replicas
started again from it, and while one replica fails.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from servax.bucketing import Grid
from servax.jit_cache import PackedServable, Placement, Servable, StoredPrograms
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.faults import FaultPolicy
from servax.server.cli.wiring import build
from servax.server.config import ServeConfig
from servax.server.errors import ConfigError
from servax.server.metrics import Metrics
from toy_layers import SEGMENTS, WEIGHTS, items_of, packed, padded

ITEMS = items_of(*(1, 3, 8, 5, 2, 7, 4, 6, 8, 1) * 6)


def spread(each):
    """Over the first `each` devices: the hidden dim over one axis of the mesh, rows over another."""
    mesh = Mesh(np.array(jax.devices()[:each]).reshape(each // 2, 2), ("data", "model"))
    return Placement(mesh, {"in": P(None, "model"), "out": P("model", None)}, {"x": P("data")})


def model(*, packs=False, each=1, sizes="static"):
    one = Servable(
        padded,
        dict(WEIGHTS),
        inputs={"x": "float32[length, 4]", "mask": "mask[length]"},
        grid=Grid.parse("1x8,2x8", ("batch", "length")),
        placement=spread(each) if each > 1 else None,
        sizes=sizes,
        name="model",
    )
    return PackedServable(one, packed, max_segments=SEGMENTS) if packs else one


class Faulty:
    """Loads programs that count their runs by device, and raise on those that are broken."""

    def __init__(self, store):
        self.broken, self.runs = set(), Counter()
        self._made = StoredPrograms(store)

    def __call__(self, servable, bucket, leaves):
        return self._bugged(servable, self._made(servable, bucket, leaves))

    def stepped(self, servable, plan, leaves):
        return self._bugged(servable, self._made.stepped(servable, plan, leaves))

    def _bugged(self, servable, program):
        first, inner = servable.devices[0].id, program.executable

        def execute(*arguments):
            self.runs[first] += 1
            if first in self.broken:
                raise RuntimeError(f"UNAVAILABLE: device {first} is gone")
            return inner(*arguments)

        program.executable = execute
        return program


def ask(server, times=1):
    futures = [server.model().run_threaded([item]) for _ in range(times) for item in ITEMS]
    return [row for future in futures for row in future.result(60)]


def asked_until(server, wanted, done):
    """Ask until every thread had its turn; how far the worst answer is off."""
    far = 0.0
    for _ in range(20):
        far = max(far, difference(ask(server, 2), wanted))
        if done():
            break
    return far


def difference(got, wanted):
    return max(
        float(np.abs(a - b).max())
        for mine, other in zip(got, wanted * (len(got) // len(wanted)), strict=True)
        for a, b in zip(mine, other, strict=True)
    )


def opened(folder):
    return Store.open(folder / "store", home=folder / "home")


def from_store(folder, wanted, options, devices):
    store = opened(folder)
    with Server(model(**options), devices=devices, store=store, seal=True) as server:
        far = difference(ask(server), wanted)
    told = store.report()
    return {"difference": far, "loaded": told.loaded, "compiled": told.compiled}


def kind(folder, options, devices, wanted):
    (folder / "home").mkdir(parents=True, mode=0o700)
    found = {name: from_store(folder, wanted, options, devices) for name in ("first", "again")}
    faulty = Faulty(opened(folder))
    policy = FaultPolicy(retries=1, open_after=1, backoff_s=30.0, most_backoff_s=60.0)
    with Server(model(**options), devices=devices, compile_program=faulty, faults=policy) as server:
        before = Counter(faulty.runs)  # of the warm-up: every place
        far = asked_until(server, wanted, lambda: len(faulty.runs - before) == len(before))
        found["well"], found["unused"] = far, sorted(before.keys() - (faulty.runs - before).keys())
        faulty.broken = {sorted(before)[1]}
        found["one_broken"] = asked_until(server, wanted, lambda: bool(server.status()["error"]))
        found["ready"], found["trouble"] = server.ready, server.status()["error"] or ""
        found["left"] = sum(server.load().values())
    return found


KINDS = {
    "packed": ({"packs": True}, 3),
    "tuned": ({"sizes": "tuned"}, 2),
    "spread": ({"each": 2}, 8),
    "spread_packed": ({"each": 4, "packs": True}, 8),
    "spread_switched": ({"each": 2, "sizes": "switched"}, 4),
}


def served():
    return model(each=2)


def by_options():
    """Places that the option `replicas` makes of a model over two devices, and its refusal of too many."""
    found = {}
    for replicas in (1, 3, 0, 5):
        config = ServeConfig(model=f"{__name__}:served", replicas=replicas, use_store=False)
        try:
            server, _ = build(config, Metrics())
        except ConfigError as error:
            found[replicas] = str(error)
        else:
            found[replicas] = len(server._dispatcher.devices.each)
    return found


def main(folder):
    with Server(model()) as server:
        wanted = ask(server)
    found = {
        name: kind(folder / name, options, jax.devices()[:count], wanted)
        for name, (options, count) in KINDS.items()
    }
    print(json.dumps(found | {"options": by_options()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
