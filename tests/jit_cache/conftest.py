"""A servable's programs without a server, and a store of programs that are only numbers."""

import json
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import CompileService, Servable, Staging, check_item, compile_program
from servax.jit_cache.errors import LoadRefused, NotStorable
from servax.jit_cache.store import Fingerprint, Store, load_or_compile


class Harness:
    """A servable's programs without a server: compile, pad, run, cut."""

    def __init__(self, servable):
        self.servable = servable
        self.leaves = [jax.device_put(leaf) for leaf in servable.leaves]
        self.programs = {}

    def bucket(self, *sizes):
        return Bucket(self.servable.grid.axes, sizes)

    def program(self, *sizes):
        bucket = self.bucket(*sizes)
        if bucket not in self.programs:
            self.programs[bucket] = compile_program(self.servable, bucket, self.leaves)
        return self.programs[bucket]

    def run(self, sizes, *items):
        """Answers of the items, run together in the bucket of these sizes."""
        program = self.program(*sizes)
        known = self.servable
        options = {"allow_nonfinite": known.allow_nonfinite}
        checked = [check_item(known.signature, item, known.limits, **options) for item in items]
        staging = Staging(known.signature, program.bucket)
        outputs = program(staging.fill([item for item, _ in checked], [size for _, size in checked]))
        arrays = list(map(jax.device_get, outputs))
        known.outputs.check_batch(arrays, program.bucket.rows)
        rows = known.outputs.cut(arrays, [size for _, size in checked])
        return [jax.tree.unflatten(known.outputs.treedef, row) for row in rows]


@pytest.fixture
def harness():
    def make(apply, params=None, **options):
        return Harness(apply if isinstance(apply, Servable) else Servable(apply, params, **options))

    return make


@pytest.fixture
def service():
    service = CompileService()
    yield service
    service.close()


class Numbers:
    """Executables are integers; a pickle, like the real ones."""

    def __init__(self, refuses=lambda payload: False, storable=True):
        self.refuses, self.storable = refuses, storable
        self.loads = 0

    def dump(self, executable, devices):
        if not self.storable:
            raise NotStorable("it calls back")
        return pickle.dumps(executable), {"targets": []}

    def load(self, payload, devices):
        self.loads += 1
        if self.refuses(payload):
            raise LoadRefused("wrong machine")
        return pickle.loads(payload)


class Host:
    """Opens one store again and again, as restarts of one process do, and counts compiles."""

    codec = Numbers

    def __init__(self, folder):
        self.folder = folder
        self.compiles = Counter()

    @staticmethod
    def key(number, **environment):
        return Fingerprint(
            {
                "model": {"code": "abc"},
                "program": {"bucket": {"batch": number}},
                "environment": {"jaxlib": "1", **environment},
            }
        )

    def open(self, location="store", **options):
        options = {"home": self.folder / "home", "trial": None, **options}
        return Store.open(location if "://" in str(location) else self.folder / location, **options)

    def start(self, numbers=range(1, 13), codec=None, **options):
        """One start with a program for each number; returns its store."""
        store = self.open(**options)
        store.pin(map(self.key, numbers))
        for number in numbers:
            self.fetch(store, number, codec)
        return store

    def fetch(self, store, number, codec=None):
        def build():
            self.compiles[number] += 1
            return number * 10

        made = load_or_compile(store, self.key(number), build, codec=codec or Numbers())
        assert made.executable == number * 10
        return made

    def new_compiles(self):
        count = self.compiles.total()
        self.compiles.clear()
        return count

    def entry(self, number, location="store"):
        return self.folder / location / "v1" / f"{self.key(number).digest}.program"

    def quarantine(self):
        return sorted(path.name.split(".")[1] for path in (self.folder / "store" / "quarantine").iterdir())

    @staticmethod
    def counts(store):
        """Programs that a start loaded, compiled and refused."""
        report = store.report()
        assert report.total == report.loaded + report.compiled + report.refused
        return report.loaded, report.compiled, report.refused


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture(scope="session")
def free_ports():
    """Ports that nobody listens on, as many as asked for."""

    def found(count):
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            return [one.getsockname()[1] for one in sockets]

    return found


@pytest.fixture(scope="session")
def two_processes(free_ports):
    """Runs a script of this folder as two processes of two devices each; what both print last, as JSON.

    Its arguments are its number, a folder and free ports.
    """

    def run(name, folder, ports=2):
        script = Path(__file__).with_name(name)
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
        flags["PYTHONPATH"] = str(script.parents[1])  # of toy_layers
        given = [str(folder), *map(str, free_ports(ports))]
        both = [
            subprocess.Popen(
                [sys.executable, str(script), str(number), *given],
                env={**os.environ, **flags},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in (0, 1)
        ]
        try:
            told = [one.communicate(timeout=240) for one in both]
        finally:
            for one in both:
                one.kill()
        for one, (_, errors) in zip(both, told, strict=True):
            assert one.returncode == 0, errors[-3000:]
        return [json.loads(out.splitlines()[-1]) for out, _ in told]

    return run
