"""Requests without a server, and servers over a device that obeys the test."""

import gc
import math
import time

import numpy as np
import pytest
from servax.bucketing import CostModel, Grid, Planner
from servax.jit_cache import Servable
from servax.server import Server
from servax.server.batching.batcher import Batcher, Policy
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice
from servax.server.batching.request import Request, State


class Told:
    """A sink that remembers what it was handed."""

    lag_s = 0.0

    def __init__(self):
        self.requests = []

    def deliver(self, requests):
        assert all(request.over for request in requests)
        self.requests += requests

    def states(self):
        return [request.state for request in self.requests]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def ask(told):
    """Makes a request of rows with these lengths."""

    def make(*lengths, at=0.0, priority=5, deadline=math.inf):
        return Request(
            [{"x": np.zeros(length, np.float32)} for length in lengths],
            [(length,) for length in lengths],
            arrived_s=at,
            sink=told,
            priority=priority,
            deadline_s=deadline,
        )

    return make


def linear(bucket):
    return 1e-4 + 1e-5 * bucket.elements


@pytest.fixture
def batcher_of():
    """Makes a batcher over buckets written as "1x64,8x64"; a run costs 100 µs and 10 µs an element."""

    def make(buckets, seconds=linear, axes=("batch", "length"), **policy):
        grid = Grid.parse(buckets, axes)
        cost = CostModel(seconds)
        batcher = Batcher(cost, Policy(**policy))
        batcher.planner = Planner(grid, cost, window=batcher.policy.window)
        return batcher

    return make


def settle(launch, state=State.DONE):
    """End the requests of a launch, as a device would."""
    for request in {row.request for row in launch.rows}:
        if not request.over:
            if request.state is State.WAITING:
                request.move(State.RUNNING)
            request.move(state)


@pytest.fixture
def settled():
    return settle


@pytest.fixture
def eventually():
    """Waits until something holds: what a batch was is told after its answers are."""

    def wait(condition):
        end_s = time.monotonic() + 20.0
        while not condition() and time.monotonic() < end_s:
            time.sleep(0.001)
        assert condition()

    return wait


@pytest.fixture
def survivors():
    """What weak references still hold, at last: a thread may yet return from the call that woke the test."""

    def find(references):
        end_s = time.monotonic() + 20.0
        while True:
            gc.collect()
            alive = [one() for one in references if one() is not None]
            if not alive or time.monotonic() > end_s:
                return alive
            del alive
            time.sleep(0.001)

    return find


@pytest.fixture
def doubling():
    """Makes a servable that doubles `x: float32[length]` and keeps padding at zero."""

    def make(batch=8, length=32, name="double", scheme="powers_of_two:8", **options):
        return Servable(
            lambda x: x * 2,
            inputs={"x": "float32[length]"},
            limits={"batch": batch, "length": length},
            scheme=scheme,
            name=name,
            **options,
        )

    return make


@pytest.fixture
def serve(request):
    """Makes a started, ready server over a `FakeDevice`; released and closed when the test ends."""

    def make(*servables, run=None, wait=True, **options):
        device = FakeDevice(run)
        # A clock that stands still measures no costs, so that plans are the same at every run.
        options.setdefault("clock", ManualClock())
        server = Server(*servables, compile_program=device.compile, **options)

        def end():
            device.release()
            server.close(drain_s=10.0)

        request.addfinalizer(end)
        server.start()
        if wait:
            server.wait_ready(60.0)
            device.runs.clear()
        return server, device

    return make
