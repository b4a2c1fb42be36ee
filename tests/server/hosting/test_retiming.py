"""Second timings at the end of a warm-up: a bucket whose first runs were disturbed does not stay dear."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid
from servax.jit_cache import Program
from servax.jit_cache.store import Store
from servax.server import Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice
from servax.server.hosting.programs import Programs
from servax.server.hosting.retiming import Timings, implausible

AXES = ("batch", "length")
GRID = Grid.explicit(AXES, [(b, n) for b in (1, 2, 4) for n in (16, 64, 256)])


def at(text):
    return Bucket.parse(text, AXES)


def true_s(bucket):
    """What a bucket of the fake device takes."""
    return 0.010 + 1e-4 * bucket.elements


class Disturbed:
    """Programs of a fake device on a manual clock, whose first timings are disturbed.

    Args:
        spoilt: how many times as long the runs of the first timing take, by bucket.
        known: seconds that an earlier start measured, by bucket.
        seconds: what runs take otherwise.
    """

    def __init__(self, spoilt=(), known=(), seconds=true_s):
        self.clock, self.device = ManualClock(), FakeDevice(self.run)
        self.spoilt = {at(text): factor for text, factor in dict(spoilt).items()}
        self.known = {at(text): seconds for text, seconds in dict(known).items()}
        self.counts, self.spent, self.seconds = Counter(), Counter(), seconds
        self.remembered, self.on_run = {}, lambda bucket: None

    def __call__(self, servable, bucket, leaves):
        made = self.device.compile(servable, bucket, leaves)
        return Program(bucket, made.executable, leaves, replace(made.facts, run_s=self.known.get(bucket)))

    def measured(self, servable, bucket, run_s, plan=None):
        self.remembered[bucket] = run_s

    def run(self, bucket, inputs):
        self.counts[bucket] += 1
        self.on_run(bucket)
        first = self.counts[bucket] <= 3 and self.spent[bucket] < 0.1  # a short run is repeated at once
        took_s = self.seconds(bucket) * (self.spoilt.get(bucket, 1.0) if first else 1.0)
        self.spent[bucket] += took_s
        self.clock.advance(took_s)
        return [inputs["x"] * 2]


@pytest.fixture
def warmed(doubling, request):
    """Warms a server on such a device; gives its model."""

    def make(device, *, wait=True, batch=2, length=64, **options):
        servable = doubling(batch=batch, length=length, scheme="powers_of_two:16")
        server = Server(servable, compile_program=device, clock=device.clock, **options)
        request.addfinalizer(server.close)
        server.start()
        if wait:
            server.wait_ready(60.0)
        return server

    return make


# -- the decision --------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(0, 1e-5))
def test_times_that_grow_with_the_work_are_plausible(call_s, element_s, square_s):
    seconds = {
        one: call_s + element_s * one.elements + square_s * one.elements * one["length"] for one in GRID
    }
    assert implausible(seconds) == set()


@given(st.sampled_from(GRID.buckets), st.floats(20.0, 100.0))
def test_one_that_is_far_too_dear_is_found_wherever_a_neighbour_tells(spoilt, factor):
    seconds = {one: true_s(one) for one in GRID} | {spoilt: factor * true_s(spoilt)}
    # Of one row at the greatest length nothing is expected: no bucket is around it, none is half of it.
    if spoilt != at("1x256") or factor * true_s(spoilt) > 1.2 * true_s(at("4x256")):
        assert spoilt in implausible(seconds)


def test_implausible_is_dearer_than_a_larger_one_or_than_two_halves():
    seconds = {at("1x16"): 0.01, at("2x16"): 0.03, at("1x64"): 0.008, at("4x64"): 0.02}
    assert implausible(seconds) == {at("1x16"), at("2x16")}
    assert implausible({at("1x16"): 0.0105, at("1x64"): 0.0100}) == set()  # as two timings differ
    whole = {Bucket(("batch",), (rows,)): 1.0 for rows in (1, 2)}
    assert implausible(whole) == set()


def test_a_time_is_believed_once_two_agree():
    timings = Timings({at("1x16"): 0.03, at("1x64"): 0.02, at("2x64"): 0.04}, GRID)
    assert timings.doubted() == [at("1x16"), at("1x64"), at("2x64")]  # the implausible one first
    for text, seconds in (("1x16", 0.01), ("1x64", 0.0205), ("2x64", 0.08)):
        timings.add(at(text), seconds)
    assert timings.doubted() == [at("1x16"), at("2x64")]
    timings.add(at("1x16"), 0.0101)
    timings.add(at("2x64"), 0.041)
    assert timings.doubted() == []
    assert [timings.least(at(text)) for text in ("1x16", "1x64", "2x64")] == [0.01, 0.02, 0.04]


def test_what_an_earlier_start_measured_is_doubted_only_if_it_is_implausible():
    known = {one: true_s(one) for one in GRID}
    assert Timings(known, []).doubted() == []
    assert Timings(known | {at("1x16"): 9.0}, []).doubted() == [at("1x16")]
    assert Timings(known, [at("2x64")]).doubted() == [at("2x64")]


def test_there_is_nothing_to_choose_in_one_bucket_and_nothing_to_see_on_a_clock_that_stands():
    assert Timings({at("1x16"): 1.0}, GRID).doubted() == []
    assert Timings(dict.fromkeys(GRID, 0.0), GRID).doubted() == []


# -- a server ------------------------------------------------------------------------------------------


def test_disturbed_first_timings_are_corrected_before_the_server_is_ready(warmed):
    device, ready = Disturbed({"1x32": 4.0, "2x64": 3.0, "1x16": 1.5}), []
    device.on_run = lambda bucket: ready.append(server.model().ready)
    server = warmed(device, wait=False)
    server.wait_ready(60.0)
    device.on_run = lambda bucket: None
    model = server.model()
    assert set(ready) == {False}
    truth = {bucket: true_s(bucket) for bucket in model.grid}
    assert model.cost.measured() == pytest.approx(truth)
    assert {one.bucket: one.run_s for one in model.report.warm} == pytest.approx(truth)
    assert device.remembered == pytest.approx(truth)
    assert all(model.cost.hopes(bucket) for bucket in truth)  # traffic has still the last word
    assert np.array_equal(server(np.ones(20, np.float32)), np.full(20, 2.0))


def test_times_that_are_known_and_plausible_delay_nothing(warmed):
    grid = [f"{rows}x{length}" for rows in (1, 2) for length in (16, 32, 64)]
    device = Disturbed(known={text: true_s(at(text)) for text in grid})
    warmed(device)
    assert device.counts == dict.fromkeys(map(at, grid), 1)  # so that no request is its first
    assert device.remembered == {at(text): true_s(at(text)) for text in grid}


def test_an_error_that_the_store_keeps_is_found_out(warmed):
    grid = [f"{rows}x{length}" for rows in (1, 2) for length in (16, 32, 64)]
    device = Disturbed(known={text: true_s(at(text)) for text in grid} | {"1x32": 1.0})
    model = warmed(device).model()
    wrong = at("1x32")
    assert model.cost.measured()[wrong] == pytest.approx(true_s(wrong))
    assert device.remembered[wrong] == pytest.approx(true_s(wrong))
    assert device.counts[wrong] <= 3
    assert sum(device.counts.values()) - device.counts[wrong] == len(grid) - 1


def test_second_timings_take_a_second_at_most_after_a_short_warm_up(warmed):
    device = Disturbed({"1x16": 2.0}, seconds=lambda bucket: 0.3 + 1e-4 * bucket.elements)
    server = warmed(device)
    first_s = sum((2.0 if str(one) == "1x16" else 1.0) * device.seconds(one) for one in server.model().grid)
    assert first_s < device.clock.now() <= first_s + 1.0 + 1e-6
    assert server.model().cost.measured()[at("1x16")] == pytest.approx(0.3016)  # the implausible one first


def test_a_budget_of_the_warm_up_is_not_passed_for_them(warmed):
    device = Disturbed({"1x16": 4.0})
    server = warmed(device, programs=Programs(budget_s=0.01))
    server._warmup.join(30.0)
    assert server.model().report.complete  # what was left followed, and was timed again on the idle server
    measured = server.model().cost.measured()
    assert measured == pytest.approx({bucket: true_s(bucket) for bucket in measured})


def test_a_second_run_that_fails_leaves_the_first_timings(warmed, caplog):
    device, failed = Disturbed(), []

    def fails(bucket):
        if device.counts[bucket] == 4 and not failed:
            failed.append(bucket)
            raise RuntimeError("out of luck")

    device.on_run = fails
    server = warmed(device)
    assert server.ready
    assert "not timed a second time: out of luck" in caplog.text
    assert server.model().report.complete
    assert server([1.0]) == [2.0]


def test_what_traffic_corrected_stays(warmed):
    model = warmed(Disturbed()).model()
    bucket = at("1x16")
    program = model.cache.get(bucket)
    model.timed_again(program, 2.0)  # more: it was disturbed
    assert model.cost.measured()[bucket] == pytest.approx(true_s(bucket))
    for _ in range(3):
        model.cost.observe(bucket, 0.05)
    known_s = model.cost.measured()[bucket]
    model.timed_again(program, 1e-4)
    assert model.cost.measured()[bucket] == known_s


def test_beside_requests_nothing_is_timed_again(warmed):
    """Ready once the covering bucket is: a request that the device holds keeps second timings away."""
    device, gate, held, futures = Disturbed(), threading.Event(), threading.Event(), []
    first_runs = 6 * 3

    def hold(bucket):
        if device.counts.total() == first_runs:
            futures.append(server.model().run_threaded([{"x": np.ones(5, np.float32)}]))
        elif futures:
            held.set()
            assert gate.wait(30.0)

    device.on_run = hold
    server = warmed(device, ready_when="coverage", wait=False)
    try:
        assert held.wait(30.0)
        while not server.wait_over(0.0):
            device.clock.advance(1.0)
            server._warmup.join(0.02)
        assert device.counts.total() == first_runs + 1
        assert server.warm
    finally:
        gate.set()
    assert futures[0].result(30.0)[0][0].tolist() == [2.0] * 5


def test_a_new_version_is_timed_again_too(warmed, doubling):
    device = Disturbed()
    server = warmed(device)
    device.counts.clear()
    device.spent.clear()
    device.spoilt = {at("1x32"): 5.0}
    server.replace(doubling(batch=2, length=64, scheme="powers_of_two:16", version="2"))
    measured = server.model().cost.measured()
    assert measured == pytest.approx({bucket: true_s(bucket) for bucket in measured})


def test_they_compile_nothing(doubling, tmp_path, compiles):
    servable = doubling(batch=2, length=16)

    def start():
        with Server(servable, store=Store.open(tmp_path / "store", trial=None), seal=True) as server:
            return [one.run_s for one in server.model().report.warm]

    made = start()
    with compiles.none():
        assert len(start()) == len(made) == 4
