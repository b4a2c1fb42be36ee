"""While programs are compiled or a version is swapped, requests take what they took before.

Time is a manual clock that each run of the fake device moves on, and a request comes in at the beginning of
the run of the one before: the worst moment. So nothing but what the device does counts. The percentiles of a
real machine are measured in experiments/live_changes.
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
        self.on_run = lambda inputs: None

    def _run(self, bucket, inputs):
        self.on_run(inputs)
        self._clock.advance(RUN_S)
        return [inputs["x"] * 2]

    def __call__(self, servable, bucket, leaves):
        self.compiled.append(bucket)
        assert self.gate.wait(30.0)
        made = self.device.compile(servable, bucket, leaves)
        return Program(bucket, made.executable, leaves, ProgramFacts(0.0, 0.0, 0.0, 0, 0, 0, 1024))


class Arrivals:
    """Each request comes at the beginning of the last one's run, until `end`; how many runs each took.

    New programs are run on zeros.
    """

    def __init__(self, server, clock, compiler, lengths):
        self._model, self._clock, self._lengths = server.model(), clock, lengths
        self._compiler, self._sent, self._open = compiler, 0, True
        self.took = []
        self.wrong = 0
        self.changed = threading.Condition()
        compiler.on_run = lambda inputs: self._arrive() if inputs["x"].any() else None
        self._arrive()

    def _arrive(self):
        if not self._open:
            return
        length = self._lengths[self._sent % len(self._lengths)]
        self._sent += 1
        begin_s = self._clock.now()
        answer = self._model.run_threaded([{"x": np.arange(length, dtype=np.float32)}])
        answer.add_done_callback(lambda done: self._settle(begin_s, length, done))

    def _settle(self, begin_s, length, done):
        with self.changed:
            self.wrong += not np.array_equal(done.result()[0][0], 2 * np.arange(length))
            self.took.append(round((self._clock.now() - begin_s) / RUN_S))
            self.changed.notify_all()

    def during(self, ready):
        """What the requests took that ended until `ready`, at least 200 of them."""
        with self.changed:
            first = len(self.took)
            assert self.changed.wait_for(lambda: len(self.took) >= first + 200 and ready(), 30.0)
            return self.took[first:]

    def end(self):
        self._open = False
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.took) == self._sent, 30.0)
        assert not self.wrong


def test_C9_the_median_stays_while_four_buckets_compile(doubling):
    clock = ManualClock()
    compiler = Compiler(clock)
    options = Programs(policy="background", budget_bytes=1)
    with Server(
        doubling(batch=1, length=128), compile_program=compiler, clock=clock, programs=options
    ) as server:
        server._warmup.join(30.0)
        compiler.gate.clear()
        lengths = [5, 12, 30, 60]
        arrivals = Arrivals(server, clock, compiler, lengths)
        during = arrivals.during(lambda: True)
        assert len(server.model().grid) == 1  # all four are asked for, none is there
        assert set(during[1:]) == {2}  # the run at whose beginning it came, and its own
        compiler.gate.set()
        # Each comes into use between two batches; a request waits for one of its first runs at most.
        coming = arrivals.during(lambda: len(server.model().grid) == 5)
        assert np.median(coming) == 2
        assert max(coming) <= 3
        after = arrivals.during(lambda: True)
        arrivals.end()
        assert set(after[5:]) == {2}
        compiler.device.runs.clear()
        for length in lengths:
            server(np.arange(length, dtype=np.float32))
        assert [run.bucket for run in compiler.device.runs] == [
            Bucket(AXES, (1, length)) for length in (8, 16, 32, 64)
        ]
        assert len(compiler.compiled) == 5


def test_W7_the_99th_percentile_stays_while_a_version_is_swapped(doubling):
    clock = ManualClock()
    compiler = Compiler(clock)
    first, second = (doubling(batch=1, length=16, version=version) for version in "12")
    batches = []
    with Server(first, compile_program=compiler, clock=clock, on_batch=batches.append) as server:
        server._warmup.join(30.0)
        arrivals = Arrivals(server, clock, compiler, [10])
        quiet = arrivals.during(lambda: True)
        swap = threading.Thread(target=server.replace, args=(second,))
        swap.start()
        during = arrivals.during(lambda: not swap.is_alive())
        swap.join()
        after = arrivals.during(lambda: True)
        arrivals.end()
        assert server.model().version == "2"
        assert set(quiet[1:]) == {2}
        assert np.percentile(during, 99) <= 1.5 * np.percentile(quiet, 99)
        assert max(during) <= 3  # one run of the new version's between, never two
        assert set(after[5:]) == {2}
        assert all(batch.rows == 1 for batch in batches)
