"""Run in a process of eight CPU devices: prints what a server over all of them does, as JSON."""

import itertools
import json
import sys
import threading
import time

import jax
import numpy as np
from servax.experiments.noop import FACTS
from servax.jit_cache import Program, Servable
from servax.jit_cache.replicas import on_replica
from servax.server import Server
from servax.server.batching.faults import FaultPolicy


def servable(**options):
    options.setdefault("name", "noop")
    return Servable(
        lambda x: x, inputs={"x": "float32[4]"}, limits={"batch": 4}, scheme={"batch": [4]}, **options
    )


class Sick:
    """A device that hands its input back; those in `broken` raise, and all count their runs."""

    def __init__(self):
        self.broken, self.runs = set(), {device.id: 0 for device in jax.devices()}

    def compile(self, servable, bucket, leaves):
        (device,) = servable.devices

        def execute(_, inputs):
            self.runs[device.id] += 1
            time.sleep(0.001)
            if device.id in self.broken:
                raise RuntimeError(f"UNAVAILABLE: device {device.id} is gone")
            return [inputs["x"].copy()]

        return Program(bucket, execute, leaves, FACTS)


class Lockstep:
    """Devices whose runs take one tick each, counted and not slept.

    A run ends once every device is in one: were two of them to wait for each other, the tick would not end.
    """

    def __init__(self, devices):
        self.ticks, self.runs, self.counting = 0, 0, False
        self._all_busy = threading.Barrier(devices, self._tick, timeout=60.0)

    def _tick(self):
        self.ticks += 1

    def compile(self, servable, bucket, leaves):
        def execute(_, inputs):
            if self.counting:
                self.runs += 1
                self._all_busy.wait()
            return [inputs["x"].copy()]

        return Program(bucket, execute, leaves, FACTS)


def ticks(devices):
    """Ticks that 96 full batches take, and how many runs they were."""
    lockstep = Lockstep(len(devices))
    with Server(servable(), compile_program=lockstep.compile, devices=devices) as server:
        model, lockstep.counting = server.model(), True
        futures = [model.run_threaded([{"x": np.full(4, n, np.float32)}] * 4) for n in range(96)]
        for n, future in enumerate(futures):
            assert future.result(90)[0][0][0] == n
    return lockstep.ticks, lockstep.runs


def throughput():
    (one, _), (all_of_them, runs) = ticks(jax.devices()[:1]), ticks(jax.devices())
    return {"runs": runs, "times": one / all_of_them}


def failing():
    sick, faults = Sick(), []
    policy = FaultPolicy(retries=1, open_after=2, backoff_s=0.05, most_backoff_s=0.1, gone_after=3)
    options = {"compile_program": sick.compile, "devices": jax.devices(), "faults": policy}
    found = {}
    with Server(servable(), on_fault=faults.append, **options) as server:
        model = server.model()

        def answers(count):
            futures = [model.run_threaded([{"x": np.full(4, n, np.float32)}]) for n in range(count)]
            return [float(future.result(60)[0][0][0]) for future in futures] == list(range(count))

        found["well"] = answers(400)
        sick.broken = {2, 5}
        found["two_broken"] = answers(2000)
        found["ready"], found["live"] = server.ready, server.live
        found["trouble"] = server.status()["error"]
        found["moved"] = any(record.action == "moved" for record in faults)
        before = dict(sick.runs)
        found["others_go_on"] = answers(400) and sick.runs[0] > before[0]
        sick.broken = set(range(8))
        errors = set()
        until_s = time.monotonic() + 30
        while server.live and time.monotonic() < until_s:
            try:
                model.run_threaded([{"x": np.zeros(4, np.float32)}]).result(60)
            except Exception as error:
                errors.add(type(error).__name__)
        found["all_broken"] = sorted(errors)
        found["live_when_all_are_gone"] = server.live
        sick.broken = set()
        while not server.ready and time.monotonic() < until_s:
            time.sleep(0.01)
        found["back"] = answers(400)
        until_s = time.monotonic() + 30
        while server.status()["error"] and time.monotonic() < until_s:
            time.sleep(0.01)
        found["trouble_after"] = server.status()["error"]
        found["left"] = server.load()
    return found


def real():
    """Real programs, a new version under load, and no compile after warm-up."""

    def made(factor, version):
        return Servable(
            lambda params, x: x * params,
            np.float32(factor),
            inputs={"x": "float32[length]"},
            limits={"batch": 4, "length": 16},
            scheme={"batch": [1, 4], "length": [8, 16]},
            name="times",
            version=version,
        )

    wrong, stop = [], threading.Event()
    with Server(made(2, "1"), devices=jax.devices()[:3], seal=True) as server:

        def ask():
            for length in itertools.cycle((3, 9, 16)):
                if stop.is_set():
                    return
                got = server(np.ones(length, np.float32))
                if got.shape != (length,) or got[0] not in (2.0, 5.0):
                    wrong.append(got)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join()
        program = server.model().cache.get(server.model().order[0])
        places = []
        for index in range(3):
            with on_replica(index):
                (out,) = program({"x": np.ones(program.bucket.sizes, np.float32)})
            places += [device.id for device in out.devices()]
    with Server(made(2, "1"), devices=jax.devices()[:3]) as server:
        stop.clear()
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        server.replace(made(5, "2"), timeout_s=60)
        stop.set()
        for thread in threads:
            thread.join()
        after = float(server(np.ones(3, np.float32))[0])
    return {"wrong": len(wrong), "places": sorted(places), "after": after}


if __name__ == "__main__":
    print(json.dumps({"throughput": throughput, "failing": failing, "real": real}[sys.argv[1]]()))
