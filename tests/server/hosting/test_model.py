"""The door of a model: what it refuses, what it says of itself, which programs it runs."""

import math
import threading

import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Servable
from servax.server import (
    BadRequest,
    BadTensor,
    Closed,
    DeadlineExceeded,
    NonFiniteInput,
    NotReady,
    Overloaded,
    ServerError,
    TooLong,
    TooManyRows,
)
from servax.server.batching.clock import ManualClock
from servax.server.hosting.door import allowed_s


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([{"x": np.zeros(33, np.float32)}], TooLong, "limited to 32"),
        ([{"x": np.zeros((2, 2), np.float32)}], BadTensor, "dims"),
        ([{"y": np.zeros(2, np.float32)}], BadTensor, "unknown"),
        ([{}], BadTensor, "missing"),
        ([{"x": np.zeros(0, np.float32)}], BadTensor, "must not be empty"),
        ([{"x": np.array(["a"])}], BadTensor, "send numbers"),
        ([{"x": [1.0, math.nan]}], NonFiniteInput, "finite"),
        ([item()] * 3 + [{"x": np.zeros(40, np.float32)}], TooLong, "row 3: "),
        ([item()] * 65, TooManyRows, "at most 64 rows; got 65"),
    ],
)
def test_B6_V2_bad_input_gets_its_error_at_the_door_and_runs_nothing(serve, doubling, rows, error, says):
    server, device = serve(doubling(), max_request_rows=64)
    with pytest.raises(error, match=says):
        server.model().run_threaded(rows)
    assert server.load()["waiting_rows"] == 0
    assert device.runs == []
    assert np.array_equal(server([1.0]), [2.0])


@pytest.mark.parametrize("priority", [0, 10, -1, 1.5, "high"])
def test_priorities_are_from_one_to_nine(serve, doubling, priority):
    server, _ = serve(doubling())
    with pytest.raises(BadRequest, match="priority"):
        server.model().run_threaded([item()], priority=priority)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf])
def test_timeouts_are_positive_and_finite(serve, doubling, timeout_s):
    server, _ = serve(doubling())
    with pytest.raises(BadRequest, match="positive number of seconds"):
        server.model().run_threaded([item()], timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("server_s", "client_s", "allowed"),
    [
        (None, 0.05, 0.05),
        (0.1, 10.0, 0.1),
        (0.1, 0, 0.1),
        (0.1, None, 0.1),
        (0.1, 0.05, 0.05),
        (None, None, math.inf),
    ],
)
def test_Q2_the_smallest_timeout_that_is_set(server_s, client_s, allowed):
    assert allowed_s(server_s, client_s) == allowed


def test_Q2_the_servers_timeout_holds_without_one_of_the_clients(serve, doubling):
    clock = ManualClock()
    server, device = serve(doubling(), timeout_s=0.1, clock=clock)
    device.hold()
    future = server.model().run_threaded([item()], timeout_s=10.0)
    assert device.held.wait(20.0)
    clock.advance(0.1)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
        future.result(20.0)


def test_before_coverage_the_door_says_how_far_it_is(serve, doubling):
    gate = threading.Event()

    def run(bucket, inputs):
        gate.wait(20.0)
        return [inputs["x"] * 2]

    server, _ = serve(doubling(), run=run, wait=False)
    with pytest.raises(NotReady, match=r"answers once it is warm; 0 of \d+ programs are"):
        server.model().run_threaded([item()])
    gate.set()
    server.wait_ready(20.0)
    assert np.array_equal(server([1.0]), [2.0])


def test_what_a_model_says_of_itself(serve, doubling):
    server, _ = serve(doubling(batch=4, name="twice", version="7"))
    model = server.model("twice")
    assert (model.name, model.version, model.ready) == ("twice", "7", True)
    assert dict(model.limits) == {"batch": 4, "length": 32}
    assert [(one.name, str(one.dtype), one.shape) for one in model.inputs] == [("x", "float32", ("length",))]
    assert [(one.name, one.shape) for one in model.outputs] == [("output", ("length",))]
    assert not model.allow_nonfinite
    assert "9 of 9 programs warm" in repr(model)
    assert model.load() == (0, 0)


def test_everything_a_model_refuses_is_a_server_error():
    for error in (TooLong, BadTensor, NonFiniteInput, TooManyRows, NotReady, Overloaded, Closed):
        assert issubclass(error, ServerError)


def test_only_programs_that_ran_are_planned_with(serve, doubling):
    def run(bucket, inputs):
        if bucket.sizes == (8, 32):
            raise ValueError("too large for this device")
        return [inputs["x"] * 2]

    server, device = serve(doubling(batch=8, scheme=[32]), run=run, ready_when="coverage", wait=False)
    server.wait_ready(20.0)
    server._warmup._thread.join(20.0)
    assert server.ready
    assert server.status()["failed"].keys() == {"double 8x32"}
    device.runs.clear()
    assert np.array_equal(server(np.ones((8, 3))), np.full((8, 3), 2.0))
    assert {run.bucket for run in device.runs} == {Bucket(("batch", "length"), (4, 32))}


def test_items_without_axes(serve):
    servable = Servable(lambda x: x + 1, inputs={"x": "float32[2]"}, limits={"batch": 4})
    server, device = serve(servable)
    assert np.array_equal(server([[1, 2], [3, 4], [5, 6]]), [[2, 3], [4, 5], [6, 7]])
    assert [str(run.bucket) for run in device.runs] == ["4"]
