"""One queue for several devices: by hand, and a server over eight of them in a process of its own."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servax.server.batching.admission import QueueLimits
from servax.server.batching.clock import ManualClock
from servax.server.batching.dispatcher import Dispatcher, Work
from servax.server.batching.faults import FaultPolicy
from servax.server.batching.request import State
from servax.server.batching.work import Rerun, Trial
from servax.server.errors import DeviceFailed, Unavailable

RUN_S = 0.02


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def desk(clock, batcher_of):
    """Makes a dispatcher for three devices, over buckets of up to 4 rows that take 20 ms."""

    def make(stall_s=math.inf, **policy):
        policy = FaultPolicy(**{"open_after": 1, **policy})
        dispatcher = Dispatcher(clock, QueueLimits(), stall_s=stall_s, faults=policy, devices=3)
        dispatcher.add_lane(batcher_of("1x8,4x8", lambda bucket: RUN_S))
        return dispatcher

    return make


def answer(dispatcher, work, device):
    dispatcher.finish(work.launch.rows, [[] for _ in work.launch.rows], device)


def test_each_device_takes_its_own_rows(desk, ask, told):
    dispatcher = desk()
    requests = [ask(5, 5, 5, 5) for _ in range(3)]
    for request in requests:
        dispatcher.offer(0, request)
    works = [dispatcher.take(block=False, device=device) for device in range(3)]
    assert [work.launch.rows[0].request for work in works] == requests
    assert dispatcher.load()[1] == 12
    for device in (2, 0, 1):
        answer(dispatcher, works[device], device)
    assert told.requests == [requests[2], requests[0], requests[1]]
    assert dispatcher.idle


def test_predictions_count_the_devices(desk, ask, clock):
    dispatcher = desk()
    for _ in range(30):
        dispatcher.offer(0, ask(5, 5, 5, 5, at=clock.now()))
        answer(dispatcher, dispatcher.take(block=False), 0)
        clock.advance(RUN_S)
    for _ in range(30):
        dispatcher.offer(0, ask(5, 5, 5, 5, at=clock.now()))
    forecast, ahead = dispatcher._forecast, dispatcher._ledger.ahead
    assert forecast.drain_s(ahead, clock.now()) == pytest.approx(30 * RUN_S / 3, rel=0.05)
    dispatcher.device_failed("broken", 1)
    assert forecast.drain_s(ahead, clock.now()) == pytest.approx(30 * RUN_S / 2, rel=0.05)


def test_a_broken_device_is_left_out_and_another_runs_its_rows(desk, ask, told):
    dispatcher = desk()
    request = ask(5)
    dispatcher.offer(0, request)
    work = dispatcher.take(block=False, device=1)
    assert dispatcher.device_failed("it fell off", 1)
    assert dispatcher.hand_over(Rerun(0, work.launch, 1), 1)
    assert request.state is State.RUNNING
    assert dispatcher.take(block=False, device=1) is None, "it is not to have them back"
    job = dispatcher.take(block=False, device=2)
    assert (job.rows, job.left) == (work.launch.rows, 1)
    answer(dispatcher, job, 2)
    assert told.states() == [State.DONE]
    dispatcher.offer(0, ask(5))
    assert "device 1: " in dispatcher.devices.trouble
    assert isinstance(dispatcher.take(block=False, device=0), Work)


def test_the_last_device_that_breaks_ends_all_waiting(desk, ask, told):
    dispatcher = desk()
    first, waiting = ask(5), ask(5)
    dispatcher.offer(0, first)
    work = dispatcher.take(block=False, device=0)
    dispatcher.offer(0, waiting)
    for device in (1, 0):
        dispatcher.device_failed("broken", device)
    assert dispatcher.hand_over(Rerun(0, work.launch, 1), 0)
    assert told.requests == []
    dispatcher.device_failed("broken", 2)
    assert {request.state for request in (first, waiting)} == {State.FAILED}
    assert all(isinstance(one.error, DeviceFailed) for one in told.requests)
    assert not dispatcher.hand_over(Rerun(0, work.launch, 1), 2)
    assert dispatcher.idle
    with pytest.raises(DeviceFailed, match="broken"):
        dispatcher.offer(0, ask(5))


def test_each_device_has_its_own_trial(desk, ask, clock):
    dispatcher = desk(backoff_s=1.0)
    dispatcher.device_failed("broken", 0)
    clock.advance(0.5)
    dispatcher.device_failed("broken", 1)
    clock.advance(0.5)
    assert isinstance(dispatcher.take(block=False, device=0), Trial)
    assert dispatcher.take(block=False, device=1) is None
    dispatcher.device_worked(0)
    assert dispatcher.devices.able == 2
    clock.advance(0.5)
    assert isinstance(dispatcher.take(block=False, device=1), Trial)


def test_F4_of_several_devices_one_that_hangs_fails_its_own_rows_only(desk, ask, told, clock):
    dispatcher = desk(stall_s=10.0)
    hung, runs = ask(5), ask(5)
    for device, request in enumerate((hung, runs)):
        dispatcher.offer(0, request)
        dispatcher.take(block=False, device=device)
    clock.advance(6.0)
    dispatcher.offer(0, waiting := ask(5))
    answer_of = dispatcher.take(block=False, device=2)
    dispatcher.finish(answer_of.launch.rows, [[]], 2)
    clock.advance(3.0)
    dispatcher.finish(list(dispatcher.devices[1].holds), [[]], 1)
    clock.advance(1.5)
    dispatcher.expire()
    assert (hung.state, runs.state, waiting.state) == (State.FAILED, State.DONE, State.DONE)
    assert isinstance(hung.error, Unavailable)
    assert not dispatcher.stalled
    dispatcher.offer(0, ask(5))
    assert isinstance(dispatcher.take(block=False, device=1), Work)
    assert "device 0: the device is to finish something" in dispatcher.devices.trouble


# -- a server --------------------------------------------------------------------------------------------


def probe(*what, script="replica_probe.py"):
    script = Path(__file__).with_name(script)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    flags["PYTHONPATH"] = str(script.parents[2])  # of toy_layers
    done = subprocess.run(
        [sys.executable, str(script), *what],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_devices_do_many_times_what_one_does():
    found = probe("throughput")
    assert found["runs"] == 96, "every batch was full"
    assert found["times"] >= 7.0


def test_devices_that_fail_are_left_out_and_nobody_notices_until_all_do():
    found = probe("failing")
    trouble = found.pop("trouble")
    assert "device 2: " in trouble
    assert "device 5: " in trouble
    assert "device 0: " not in trouble
    assert not any(found.pop("left").values())
    assert found == {
        "well": True,
        "two_broken": True,
        "ready": True,
        "live": True,
        "moved": True,
        "others_go_on": True,
        "all_broken": ["DeviceFailed"],
        "live_when_all_are_gone": False,
        "back": True,
        "trouble_after": None,
    }


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return probe(str(tmp_path_factory.mktemp("kinds")), script="replica_kinds_probe.py")


@pytest.mark.parametrize("kind", ["packed", "tuned", "spread", "spread_packed", "spread_switched"])
def test_replicas_of_every_kind_answer_as_one_device_start_from_the_store_and_outlive_one(kinds, kind):
    found = kinds[kind]
    allowed = 1e-5 if kind.startswith("spread") else 0.0  # a sum over two devices has another order
    for what in ("well", "one_broken"):
        assert found[what] <= allowed, what
    for start in ("first", "again"):
        assert found[start]["difference"] <= allowed, start
    assert found["first"]["loaded"] == found["again"]["compiled"] == 0
    assert found["again"]["loaded"] > 0
    assert found["unused"] == []
    assert found["ready"]
    assert found["trouble"].startswith("device 1: ")
    assert found["left"] == 0


def test_the_option_counts_copies_and_not_devices(kinds):
    found = kinds["options"]
    refused = found.pop("5")
    assert found == {"1": 1, "3": 3, "0": 4}
    assert "at most the 8 devices of this machine, of which each takes 2; got 5" in refused


def test_a_call_takes_further_batches_only_while_no_other_device_is_free(desk, ask):
    dispatcher = desk()
    for _ in range(3):
        dispatcher.offer(0, ask(5, 5, 5, 5))
    works = [dispatcher.take(block=False, device=device) for device in (0, 1)]
    assert dispatcher.devices.others_free(0)
    works.append(dispatcher.take(block=False, device=2))
    assert not dispatcher.devices.others_free(0)
    answer(dispatcher, works[1], 1)
    assert dispatcher.devices.others_free(0)
    assert not dispatcher.devices.others_free(1)


def test_W7_real_programs_on_each_device_and_a_new_version_under_load():
    assert probe("real") == {"wrong": 0, "places": [0, 1, 2], "after": 5.0}
