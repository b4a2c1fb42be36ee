"""Starts of four replicas in a process of its own, with a store and without; prints how it went, as JSON."""

import json
import logging
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from servax.bucketing import Bucket
from servax.jit_cache import WARMUP, Placement, Servable, StoredPrograms, compile_log
from servax.jit_cache.replicas import Replicas, devices_each, on_replica
from servax.jit_cache.stepped import StepPlan
from servax.jit_cache.store import Store, relocate
from toy_layers import WEIGHTS, padded

X = np.random.default_rng(1).normal(size=(2, 8, 4)).astype(np.float32)
INPUTS = {"x": X, "mask": np.ones((2, 8), bool)}
BUCKETS = [Bucket(("batch", "length"), sizes) for sizes in ((1, 8), (2, 8))]


def model(apply=padded, *, each=1):
    placement = None
    if each > 1:
        mesh = Mesh(np.array(jax.devices()[:each]), ("model",))
        placement = Placement(mesh, {"in": P(None, "model"), "out": P("model", None)})
    return Servable(
        apply,
        dict(WEIGHTS),
        inputs={"x": "float32[length, 4]", "mask": "mask[length]"},
        limits={"batch": 2, "length": 8},
        scheme={"batch": [1, 2], "length": [8]},
        placement=placement,
    )


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.seen = []

    def emit(self, record):
        self.seen.append(record.getMessage())


def start(one, store=None, devices=None, stepped=False):
    """What the programs of every place answer, how many compiles that took in which phase, and from where."""
    log, warnings = compile_log(), Warnings()
    logging.getLogger("servax").addHandler(warnings)
    places = Replicas(devices or jax.devices(), StoredPrograms(store), devices_each([one]))
    with log.during(WARMUP):
        leaves = one.place()
        _ = one.outputs
        before = dict(log.compiles)
        if stepped:
            programs = [places.stepped(one, StepPlan(tuple(BUCKETS), 2), leaves).case(BUCKETS[-1])]
        else:
            programs = [places(one, bucket, leaves) for bucket in BUCKETS]
        compiles = {phase: count - before.get(phase, 0) for phase, count in log.compiles.items()}
    copies = programs[-1].stepped._copies if stepped else programs[-1]._copies
    answers, where = [], []
    for index in range(len(places.places)):
        with on_replica(index):
            out = programs[-1](INPUTS)
        answers.append([np.asarray(leaf) for leaf in out])
        if not stepped:
            where.append(sorted(device.id for device in out[0].devices()))
    logging.getLogger("servax").removeHandler(warnings)
    return {
        "compiles": {phase: count for phase, count in compiles.items() if count},
        "sources": [copy.facts.source for copy in copies],
        "where": where,
        "same": all(
            np.array_equal(mine, first)
            for one in answers
            for mine, first in zip(one, answers[0], strict=True)
        ),
        "sum": float(answers[0][0].sum()),
        "store": None if store is None else [store.report().loaded, store.report().compiled],
        "entries": None if store is None else len(store.ls()),
        "warnings": warnings.seen,
    }


def inverse(params, *, x, mask):
    """Calls a library of linear algebra."""
    square = jnp.einsum("blf,blg->bfg", x, x) + 8 * jnp.eye(4)
    return {"y": jnp.linalg.inv(square), "kept": mask.sum(1)}


def calls_back(params, *, x, mask):
    kept = jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jnp.where(mask[..., None], kept, 0.0)


def main(folder):
    folder.mkdir()
    (folder / "home").mkdir(mode=0o700)

    def opened(**options):
        return Store.open(folder / "store", home=folder / "home", trial=None, **options)

    devices = jax.devices()
    found = {"alone": start(model(), devices=devices[:1])}
    found["memory"] = start(model())
    found["first"] = start(model(), opened())
    found["again"] = start(model(), opened())
    found["backwards"] = start(model(), opened(readonly=True), devices=devices[::-1])
    found["spread"] = start(model(each=2), opened())
    found["spread_again"] = start(model(each=2), opened(), devices=devices[2:] + devices[:2])
    found["stepped"] = start(model(), stepped=True)
    found["inverse"] = start(model(inverse))
    found["callback"] = start(model(calls_back))
    # As if the runtime went on sending programs to their old devices.
    assigned, relocate._assigned = relocate._assigned, lambda _: None
    relocate._TESTED = ()
    relocate._problem_of.cache_clear()
    found["refused"] = start(model())
    found["refused_store"] = start(model(), opened())
    relocate._assigned = assigned
    relocate._problem_of.cache_clear()
    found["intact"] = start(model(), opened())
    relocate._PLATFORMS = ()
    found["bound"] = start(model(), opened())
    found["bound_again"] = start(model(), opened())
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
