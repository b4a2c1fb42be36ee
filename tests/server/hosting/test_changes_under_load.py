"""While programs are compiled or a version is swapped, requests take what they took before.

Time is a manual clock that each run of the fake device moves on, so that only what the device really did
for a request counts. The percentiles of a real machine are measured in experiments/live_changes.
"""

import threading

import numpy as np
from servax.bucketing import Bucket
from servax.jit_cache import Program, ProgramFacts
from servax.server import Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice
from servax.server.hosting.programs import Programs

RUN_S = 0.004
AXES = ("batch", "length")


class Compiler:
    """Programs that each take `RUN_S` of the clock; compiles wait at a gate."""

    def __init__(self, clock):
        self._clock = clock
        self.device = FakeDevice(self._run)
        self.gate = threading.Event()
        self.gate.set()
        self.compiled = []

    def _run(self, bucket, inputs):
        self._clock.advance(RUN_S)
        return [inputs["x"] * 2]

    def __call__(self, servable, bucket, leaves):
        self.compiled.append(bucket)
        assert self.gate.wait(30.0)
        made = self.device.compile(servable, bucket, leaves)
        return Program(bucket, made.executable, leaves, ProgramFacts(0.0, 0.0, 0.0, 0, 0, 0, 1024))


def latency(server, clock, length):
    """Seconds of one request, which comes when the device has rested."""
    begin_s = clock.now()
    assert np.array_equal(server(np.arange(length, dtype=np.float32)), 2 * np.arange(length))
    took_s = clock.now() - begin_s
    clock.advance(0.02 - RUN_S)
    return took_s


def test_C9_the_median_stays_while_four_buckets_compile(doubling):
    clock = ManualClock()
    compiler = Compiler(clock)
    options = Programs(policy="background", budget_bytes=1)
    with Server(
        doubling(batch=1, length=128), compile_program=compiler, clock=clock, programs=options
    ) as server:
        server._warmup.join(30.0)
        quiet = [latency(server, clock, 100) for _ in range(20)]
        compiler.gate.clear()
        lengths = [5, 12, 30, 60]
        during = [latency(server, clock, length) for length in lengths * 30]
        assert len(server.model().grid) == 1  # all four are asked for, none is there
        assert np.median(during) <= 1.2 * np.median(quiet)
        assert max(during) <= 1.5 * RUN_S
        compiler.gate.set()
        # Each comes into use between two batches; a request waits for its first run at most.
        coming = []
        for _ in range(500):
            if len(server.model().grid) == 5:
                break
            server._compiler.submit(lambda: None).result()
            coming += [latency(server, clock, length) for length in lengths]
        assert len(server.model().grid) == 5
        assert np.median(coming) <= 1.2 * np.median(quiet)
        assert max(coming) <= 9.5 * RUN_S  # two runs of each of four new programs, and its own
        compiler.device.runs.clear()
        after = [latency(server, clock, length) for length in lengths]
        assert [run.bucket for run in compiler.device.runs] == [
            Bucket(AXES, (1, length)) for length in (8, 16, 32, 64)
        ]
        assert max(after) <= 1.5 * RUN_S
        assert len(compiler.compiled) == 5


def test_W7_the_99th_percentile_stays_while_a_version_is_swapped(doubling):
    clock = ManualClock()
    compiler = Compiler(clock)
    first, second = (doubling(batch=1, length=16, version=version) for version in "12")
    batches = []
    with Server(first, compile_program=compiler, clock=clock, on_batch=batches.append) as server:
        quiet = [latency(server, clock, 10) for _ in range(50)]
        swap = threading.Thread(target=server.replace, args=(second,))
        swap.start()
        during = []
        while swap.is_alive() or len(during) < 600:
            during.append(latency(server, clock, 10))
        swap.join()
        assert server.model().version == "2"
        assert np.percentile(during, 99) <= 1.5 * np.percentile(quiet, 99)
        assert max(during) <= 5.5 * RUN_S
        assert all(batch.rows == 1 for batch in batches)
