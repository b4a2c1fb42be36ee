"""The life of a server: its settings, its start, its close, a device that hangs."""

import asyncio
import threading
import time

import numpy as np
import pytest
from servax.server import Closed, ConfigError, QueueLimits, Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


def servax_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("servax-")}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ready_when": "soon"}, "'grid' or 'coverage'"),
        ({"max_request_rows": 0}, "max_request_rows"),
        ({"max_request_rows": 9, "queue": QueueLimits(rows=8)}, "at most the 8 rows of the queue"),
        ({"max_wait_s": -1.0}, "waits are finite"),
        ({"stall_s": 0.0}, "stall_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"depth": 0}, "depth"),
    ],
)
def test_impossible_settings_are_refused(doubling, options, says):
    with pytest.raises(ConfigError, match=says):
        Server(doubling(), **options)


def test_models_have_distinct_names(doubling):
    with pytest.raises(ConfigError, match="distinct names"):
        Server(doubling(), doubling())
    with pytest.raises(ConfigError, match="distinct names"):
        Server()


def test_no_thread_outlives_the_server(doubling):
    before = servax_threads()
    device = FakeDevice()
    with Server(doubling(), compile_program=device.compile) as server:
        server([1.0])
    for thread in threading.enumerate():
        if thread.name == "servax-timer":
            thread.join(10.0)
    assert servax_threads() <= before  # those of an earlier test may end meanwhile


def test_a_server_that_runs_is_handed_over_to_with(serve, doubling):
    server, _ = serve(doubling())
    with server as same:
        assert same is server
        assert server([1.0])[0] == 2.0
    with pytest.raises(Closed):
        server([1.0])


def test_a_server_is_started_once(serve, doubling):
    server, _ = serve(doubling())
    with pytest.raises(Closed, match="started once"):
        server.start()
    server.close()
    with pytest.raises(Closed, match="this one is closed"):
        server.start()
    with pytest.raises(Closed):
        server.wait_ready(1.0)
    with pytest.raises(Closed):
        server([1.0])
    with pytest.raises(Closed, match="is new"):
        Server(doubling()).wait_ready(1.0)


def test_a_server_that_was_never_started_closes(doubling):
    server = Server(doubling())
    assert server.live
    assert not server.ready
    server.close()
    server.close()
    assert server.draining
    assert server.status()["state"] == "closed"


def test_X5_close_answers_or_fails_everything_once_and_again_does_nothing(serve, doubling):
    clock = ManualClock()
    server, device = serve(doubling(batch=1), clock=clock)
    device.hold()
    futures = [server.model().run_threaded([item()]) for _ in range(11)]
    assert device.held.wait(20.0)
    resolved = []
    for future in futures:
        future.add_done_callback(resolved.append)
    closer = threading.Thread(target=server.close, kwargs={"drain_s": 5.0})
    closer.start()
    while not server.draining:
        time.sleep(0)
    with pytest.raises(Closed):
        server.model().run_threaded([item()])
    while closer.is_alive() and not all(future.done() for future in futures):
        clock.advance(5.0)
        closer.join(0.05)
    for future in futures:
        with pytest.raises(Closed):
            future.result(0)
    device.release()
    closer.join(20.0)
    assert not closer.is_alive()
    server.close()
    assert len(resolved) == 11
    assert len(device.runs) == 1


def test_X4_close_drains_what_was_admitted(serve, doubling):
    server, device = serve(doubling(batch=4))
    device.hold()
    futures = [server.model().run_threaded([item(value)]) for value in range(21)]
    assert device.held.wait(20.0)
    closer = threading.Thread(target=server.close, kwargs={"drain_s": 60.0})
    closer.start()
    while not server.draining:
        time.sleep(0)
    assert not server.ready
    device.release()
    closer.join(20.0)
    assert [one.result(0)[0][0][0] for one in futures] == [2.0 * value for value in range(21)]


def test_many_threads_close_at_once(serve, doubling):
    server, _ = serve(doubling(batch=4))
    futures = [server.model().run_threaded([item(value)]) for value in range(50)]
    closers = [threading.Thread(target=server.close, kwargs={"drain_s": 60.0}) for _ in range(8)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(30.0)
        assert not thread.is_alive()
    assert [one.result(0)[0][0][0] for one in futures] == [2.0 * value for value in range(50)]
    assert server.status()["state"] == "closed"


def test_a_second_close_can_cut_the_first_one_short(serve, doubling):
    server, device = serve(doubling(batch=1))
    device.hold()
    future = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    patient = threading.Thread(target=server.close, kwargs={"drain_s": 600.0})
    patient.start()
    while not server.draining:
        time.sleep(0)
    hasty = threading.Thread(target=server.close, kwargs={"drain_s": 0.0})
    hasty.start()
    with pytest.raises(Closed):
        future.result(20.0)
    device.release()
    for thread in (patient, hasty):
        thread.join(20.0)
        assert not thread.is_alive()


def test_the_device_thread_cannot_close_its_server(serve, doubling):
    server, _ = serve(doubling())
    errors = []

    def close(_):
        try:
            server.close()
        except RuntimeError as error:
            errors.append(str(error))

    device_is_busy = server.model().run_threaded([item()] * 2000)
    device_is_busy.add_done_callback(close)
    device_is_busy.result(20.0)
    server._dispatcher.wait_idle(20.0)
    assert errors == [] or "device thread" in errors[0]
    server.close()


@pytest.mark.anyio
async def test_aclose_leaves_the_loop_free(serve, doubling):
    server, device = serve(doubling(batch=1))
    device.hold()
    task = asyncio.create_task(server.submit([1.0]))
    await asyncio.to_thread(device.held.wait, 20.0)
    closing = asyncio.create_task(server.aclose(drain_s=60.0))
    while not server.draining:
        await asyncio.sleep(0)
    with pytest.raises(Closed):
        await server.submit([1.0])
    device.release()
    await closing
    assert np.array_equal(await task, [2.0])


def test_an_error_in_the_with_block_comes_out_and_the_server_is_closed(doubling):
    device = FakeDevice()
    with pytest.raises(ZeroDivisionError), Server(doubling(), compile_program=device.compile) as server:
        _ = 1 / 0
    assert server.status()["state"] == "closed"


def test_F4_a_hung_device_turns_health_false_and_tells_everybody(serve, doubling):
    clock = ManualClock()
    server, device = serve(doubling(batch=1), clock=clock, stall_s=10.0)
    device.hold()
    hung = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    waiting = server.model().run_threaded([item()])
    while not server._dispatcher.stalled:  # the timer thread runs at its own pace
        clock.advance(10.0)
    for future in (hung, waiting):
        assert "every 10 s" in str(future.exception(20.0))
    assert (server.live, server.ready, server.status()["state"]) == (False, False, "stalled")
    device.release()
    assert server._dispatcher.wait_idle(20.0)
    assert server.ready
    assert np.array_equal(server([1.0]), [2.0])


def test_a_hung_device_does_not_hold_close_for_ever(serve, doubling, monkeypatch):
    monkeypatch.setattr("servax.server.api._JOIN_S", 0.05)
    server, device = serve(doubling(batch=1))
    device.hold()
    future = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    server.close(drain_s=0.0)
    with pytest.raises(Closed):
        future.result(0)
    device.release()
