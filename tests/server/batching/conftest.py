"""The dispatcher and the batcher by hand, and requests to a server whose device the test holds."""

import math

import numpy as np
import pytest
from servax.server.batching.admission import QueueLimits
from servax.server.batching.batcher import Launch
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def desk(clock, batcher_of):
    """Makes a dispatcher with lanes of buckets of up to 4 rows of 8."""

    def make(lanes=1, buckets="1x8,2x8,4x8", stall_s=math.inf, policy=None, **limits):
        dispatcher = Dispatcher(clock, QueueLimits(**limits), stall_s=stall_s)
        for _ in range(lanes):
            dispatcher.add_lane(batcher_of(buckets, **(policy or {})))
        return dispatcher

    return make


@pytest.fixture
def answer():
    """Finishes what was taken; each row's answer says which of its request's it was."""

    def finish(dispatcher, work):
        dispatcher.finish(work.launch.rows, [[f"out of {row.index}"] for row in work.launch.rows])

    return finish


@pytest.fixture
def drain():
    """Launches until nothing waits."""

    def launches(batcher, now_s=0.0):
        out = []
        while isinstance(launch := batcher.next(now_s), Launch):
            out.append(launch)
        assert launch == math.inf
        return out

    return launches


@pytest.fixture
def send():
    """Sends one request for each value; all wait before the first is answered if the device is held."""

    def post(server, *values, length=3):
        model = server.model()
        return [model.run_threaded([{"x": np.full(length, value, np.float32)}]) for value in values]

    return post


@pytest.fixture
def value_of():
    """The one value of a one-row answer of the doubling model."""

    def read(future):
        ((leaf,),) = future.result(20.0)
        assert leaf.min() == leaf.max()
        return float(leaf[0])

    return read


@pytest.fixture
def hold_one(send):
    """Occupies the device with one request."""

    def hold(server, device):
        device.hold()
        (first,) = send(server, 0.5)
        assert device.held.wait(20.0)
        return first

    return hold
