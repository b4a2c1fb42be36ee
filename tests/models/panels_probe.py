"""A decoder in panels on four CPU devices, from a store; run as a script, one JSON object on stdout.

python panels_probe.py FOLDER
"""

import hashlib
import json
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from servax.bucketing import Grid
from servax.jit_cache import Placement, Servable, compile_log
from servax.jit_cache.store import Store
from servax.models import native, tiny
from servax.server import Server
from servax.server.generation import GenerationServer, SamplingParams
from servax.server.hosting.programs import Programs


def asked_at_once(count=8):
    """Whether the kernel is available, as several threads find it that are the first to ask."""
    found, ready = [], threading.Barrier(count)

    def ask():
        ready.wait(60)
        found.append(native.available())

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def servable(model, placement=None):
    return Servable(
        model.forward,
        model.params,
        inputs={"ids": "int32[length]", "lengths": "int32[]"},
        grid=Grid.parse("4x32", ("batch", "length")),
        name="decoder",
        placement=placement,
    )


def spread(model):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    split = {4: P(None, None, "model")}  # features of the panels
    specs = jax.tree.map(lambda leaf: split.get(leaf.ndim, P()), model.params)
    return Placement(mesh, specs, {"ids": P("data"), "lengths": P("data")})


def written(store):
    """What a decoder writes whose pool is read by a kernel too, and where its programs came from."""
    model = tiny(hidden_size=64, num_layers=1)
    small = {"prefill_buckets": ((1, 8),), "mixed_buckets": (), "decode_rows": (1,), "max_rows": 1}
    with GenerationServer(model, store=store, pages=8, page_size=16, seal=True, **small) as server:
        out = server.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        return {"ids": list(out.ids), "sources": sorted({one.facts.source for one in server.report.warm})}


def difference(got, wanted):
    return max(float(abs(a - b).max()) for a, b in zip(got, wanted * (len(got) // len(wanted)), strict=True))


def main(folder):
    available = asked_at_once()
    model, rng = tiny(), np.random.default_rng(0)
    texts = [rng.integers(0, 259, size).astype(np.int32) for size in (3, 8, 30, 17, 9, 32)]
    items = [{"ids": ids, "lengths": np.int32(len(ids))} for ids in texts]
    ways = {
        "alone": (None, jax.devices()[:1]),
        "replicas": (None, jax.devices()[2:]),
        "mesh": (spread(model), None),
    }
    found, answers = {"available": available}, {}
    found["written"] = written(Store.open(folder / "store", home=folder / "home"))
    for way, (placement, devices) in ways.items():
        store = Store.open(folder / "store", home=folder / "home")
        compiles = compile_log().total()[1]
        one, plain = servable(model, placement), Programs(check_padding=False)
        with Server(one, store=store, devices=devices, seal=True, programs=plain) as server:
            answers[way] = [server(**item) for item in items]
            together = server.map(items * 3)
        report = store.report()
        found[way] = {
            "store": [report.loaded, report.compiled],
            "compiles": compile_log().total()[1] - compiles,
            "bits": hashlib.sha256(b"".join(one.tobytes() for one in answers[way])).hexdigest(),
            "differences": [difference(got, answers["alone"]) for got in (answers[way], together)],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
