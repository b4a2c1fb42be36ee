"""A device that fails: told from models that fail, tried again, left alone, and back."""

import itertools
import math
import threading

import jax
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.server import DeadlineExceeded, ModelError, Unavailable
from servax.server.batching.clock import ManualClock
from servax.server.batching.faults import Fault, FaultPolicy, fault_of
from servax.server.errors import ConfigError, DeviceFailed
from servax.server.metrics import Metrics

WAIT_S = 20.0


def xla(text):
    return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (xla("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes."), Fault.MEMORY),
        (MemoryError(), Fault.MEMORY),
        (xla("INTERNAL: ECC error"), Fault.TRANSIENT),
        (xla("UNAVAILABLE: the tunnel is closed"), Fault.TRANSIENT),
        (xla("INTERNAL: CpuCallback error calling callback: ValueError"), Fault.MODEL),
        (xla("INVALID_ARGUMENT: Executable expected 3 arguments"), Fault.MODEL),
        (ValueError("INTERNAL: my own"), Fault.MODEL),
        (RuntimeError("my own"), Fault.MODEL),
        (RuntimeError("UNAVAILABLE: as a fake says it"), Fault.TRANSIENT),
    ],
)
def test_errors_of_the_device_are_told_from_those_of_a_model(error, fault):
    assert fault_of(error) is fault


@pytest.mark.parametrize(
    "bad", [{"retries": -1}, {"open_after": 0}, {"gone_after": 0}, {"backoff_s": 0}, {"backoff_s": 99}]
)
def test_impossible_policies_are_refused(bad):
    with pytest.raises(ConfigError, match="got FaultPolicy"):
        FaultPolicy(**bad)


# -- in a server ---------------------------------------------------------------------------------------


class Faults(list):
    """Records, and whether there is a new one."""

    def __init__(self):
        super().__init__()
        self.new = threading.Event()

    def append(self, record):
        super().append(record)
        self.new.set()


class Sick:
    """Runs the doubling model, or raises what the test says: an error, or a function of the inputs."""

    def __init__(self):
        self.script = iter(())

    def __call__(self, bucket, inputs):
        error = next(self.script, None)
        if callable(error):
            error = error(bucket, inputs)
        if error is not None:
            raise error
        return [inputs["x"] * 2]

    def always(self, error):
        self.script = itertools.repeat(error)

    def well(self):
        self.script = iter(())


@pytest.fixture
def sick(serve, doubling):
    """A server over a device that gets sick; faults and clock at hand."""
    run, clock, faults = Sick(), ManualClock(), Faults()

    def make(batch=8, timeout_s=None, **policy):
        server, device = serve(
            doubling(batch=batch),
            run=run,
            clock=clock,
            timeout_s=timeout_s,
            on_fault=faults.append,
            faults=FaultPolicy(**policy),
            stall_s=math.inf,  # the clock runs faster here than a busy machine
        )
        return server, device

    make.run, make.clock, make.faults = run, clock, faults
    return make


def together(server, device, *values):
    """Requests that run in one batch."""
    device.hold()
    first = server.model().run_threaded([{"x": np.zeros(3, np.float32)}])
    assert device.held.wait(WAIT_S)
    futures = [server.model().run_threaded([{"x": np.full(3, value, np.float32)}]) for value in values]
    return first, futures


def value_of(future):
    return float(future.result(WAIT_S)[0][0][0])


def actions(sick):
    return [(record.kind, record.action) for record in sick.faults]


@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE"])
def test_a_transient_error_is_retried_and_nobody_notices(sick, code):
    server, device = sick(retries=2)
    first, futures = together(server, device, 1, 2, 3, 4)
    sick.run.script = iter([None, xla(f"{code}: hiccup"), xla(f"{code}: hiccup")])
    device.release()
    assert [value_of(one) for one in (first, *futures)] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [run.bucket.rows for run in device.runs] == [1, 4, 4, 4]
    assert actions(sick) == [("transient", "retried")] * 2
    assert server.ready


def test_retries_are_bounded_and_end_with_503(sick):
    server, device = sick(retries=2, open_after=2)
    first, futures = together(server, device, 1, 2)
    sick.run.script = itertools.chain([None], itertools.repeat(xla("INTERNAL: broken")))
    device.release()
    assert value_of(first) == 0.0
    for future in futures:
        with pytest.raises(DeviceFailed, match="failed on this batch and again on retries: INTERNAL: broken"):
            future.result(WAIT_S)
    assert len(device.runs) == 1 + 3 + 1, "one run, two retries, one on padding"
    assert server.ready, "one batch is not yet a broken device"


def test_a_retry_leaves_out_rows_whose_time_is_up(sick):
    server, device = sick(retries=3, timeout_s=1.0)
    first, (late,) = together(server, device, 1)

    def passes(*_):
        sick.clock.advance(2.0)
        return xla("INTERNAL: slow to fail")

    sick.run.script = iter([None, passes])
    device.release()
    assert value_of(first) == 0.0
    with pytest.raises(DeadlineExceeded):
        late.result(WAIT_S)
    server.close(10.0)
    assert len(device.runs) == 2


def test_rows_that_fail_while_padding_works_are_to_blame_themselves(sick):
    server, device = sick(retries=1)

    def poison(bucket, inputs):
        return xla("INTERNAL: cannot be computed") if (inputs["x"] == 666).any() else None

    first, futures = together(server, device, 1, 666, 3, 4)
    sick.run.always(poison)
    device.release()
    assert [value_of(one) for one in (first, futures[0], *futures[2:])] == [0.0, 2.0, 6.0, 8.0]
    with pytest.raises(ModelError, match="cannot be computed"):
        futures[1].result(WAIT_S)
    assert ("transient", "blamed") in actions(sick)
    assert server.ready


def test_F5_out_of_memory_runs_once_more_in_halves_and_memory_returns(sick):
    server, device = sick()
    full = Bucket(("batch", "length"), (8, 8))
    free = {name: len(sets) for name, sets in server.model()._staging.items()}
    for _ in range(3):
        device.runs.clear()
        first, futures = together(server, device, *range(8))
        sick.run.always(lambda bucket, _: xla("RESOURCE_EXHAUSTED: 9 GB") if bucket == full else None)
        device.release()
        assert [value_of(one) for one in (first, *futures)] == [0.0, *(2.0 * value for value in range(8))]
        assert [run.bucket.rows for run in device.runs] == [1, 8, 4, 4]
    assert {name: len(sets) for name, sets in server.model()._staging.items()} == free
    assert server.load() == dict.fromkeys(server.load(), 0)
    assert server.ready


def test_F5_rows_that_do_not_fit_in_halves_get_503_and_other_buckets_go_on(sick):
    server, device = sick(open_after=100)
    first, futures = together(server, device, *range(8))
    sick.run.always(lambda bucket, _: xla("RESOURCE_EXHAUSTED: 9 GB") if bucket.rows >= 4 else None)
    device.release()
    assert value_of(first) == 0.0
    for future in futures:
        with pytest.raises(DeviceFailed, match="no memory left for this batch, nor for half of it"):
            future.result(WAIT_S)
    assert [run.bucket.rows for run in device.runs] == [1, 8, 4, 4], "no more than that is tried"
    assert server(np.ones(3, np.float32))[0] == 2.0
    assert actions(sick) == [("memory", "halved"), ("memory", "failed"), ("memory", "failed")]


def broken(sick, **policy):
    """A server whose circuit is open."""
    server, device = sick(batch=1, retries=0, open_after=3, **policy)
    sick.run.always(xla("UNAVAILABLE: the card fell off"))
    for _ in range(3):
        assert server.ready
        with pytest.raises(DeviceFailed):
            server(np.ones(3, np.float32))
    return server, device


def test_failures_in_a_row_open_the_circuit_and_requests_are_refused_at_once(sick):
    server, device = broken(sick)
    runs = len(device.runs)
    assert not server.ready
    assert server.live
    assert server.status()["state"] == "broken"
    assert "the card fell off" in server.status()["error"]
    with pytest.raises(Unavailable, match="the card fell off"):
        server(np.ones(3, np.float32))
    assert len(device.runs) == runs
    assert actions(sick)[-1] == ("transient", "opened")


def test_who_waits_when_the_circuit_opens_is_told(sick):
    server, device = sick(batch=1, retries=0, open_after=1)
    first, futures = together(server, device, 1, 2)
    sick.run.always(xla("UNAVAILABLE: gone"))
    device.release()
    for future in (first, *futures):
        with pytest.raises(DeviceFailed):
            future.result(WAIT_S)
    assert len(device.runs) == 2, "one run and one on padding"
    assert server.load() == dict.fromkeys(server.load(), 0)


def until(sick, done, step_s=0.5):
    """Let time pass until the device thread has seen it."""
    for _ in range(2000):
        if done():
            return
        sick.clock.advance(step_s)
        sick.faults.new.wait(0.01)
        sick.faults.new.clear()
    raise AssertionError("it never came")


def test_a_trial_that_works_closes_the_circuit(sick):
    server, device = broken(sick, backoff_s=1.0)
    sick.run.well()
    until(sick, lambda: server.ready)
    assert device.runs[-1].inputs["x"].sum() == 0, "on padding"
    assert server(np.ones(3, np.float32))[0] == 2.0
    assert actions(sick)[-1] == ("transient", "closed")


def test_a_device_that_is_gone_turns_live_false_and_may_still_come_back(sick):
    server, _ = broken(sick, backoff_s=1.0, gone_after=3)
    until(sick, lambda: actions(sick)[-1][1] == "gone")
    assert not server.live
    assert [action for _, action in actions(sick)][-3:] == ["trial", "trial", "gone"]
    assert "restart it" in server.status()["error"]
    sick.run.well()
    until(sick, lambda: server.ready)
    assert server.live


def test_faults_are_counted(sick):
    metrics = Metrics()
    broken(sick)
    for record in sick.faults:
        metrics.fault_record(record)
    labels = {"model": "double", "kind": "transient"}
    assert metrics.value("servax_device_faults_total", action="failed", **labels) == 3
    assert metrics.value("servax_device_faults_total", action="opened", **labels) == 1
    assert metrics.value("servax_device_down") == 1
