"""The server as a user sees it: its life, its health, its calls."""

import asyncio
import re
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from servax.jit_cache import CompileError, Servable, WarmupError
from servax.server import (
    BadTensor,
    Closed,
    ConfigError,
    DeadlineExceeded,
    ModelError,
    NotReady,
    Overloaded,
    QueueLimits,
    Server,
    TooManyRows,
    UnknownModel,
)
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


def servax_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("servax-")}


# -- calls ---------------------------------------------------------------------------------------------


def test_one_item_and_rows(serve, doubling):
    server, _ = serve(doubling())
    assert np.array_equal(server([1, 2, 3]), [2, 4, 6])
    assert np.array_equal(server(x=[[1, 2], [3, 4]]), [[2, 4], [6, 8]])
    assert server(np.ones((5, 4), np.float64)).dtype == np.float32


def test_trees_come_back_as_the_model_returns_them(serve):
    servable = Servable(
        lambda a, b: {"sum": a + b, "parts": (a, b)},
        inputs={"a": "float32[n]", "b": "float32[n]"},
        limits={"n": 8, "batch": 2},
    )
    server, _ = serve(servable)
    out = server([1.0, 2.0], b=[3.0, 4.0])
    assert np.array_equal(out["sum"], [4, 6])
    assert np.array_equal(out["parts"][1], [3, 4])
    rows = server(a=np.ones((3, 2)), b=np.zeros((3, 2)))
    assert rows["parts"][0].shape == (3, 2)


@pytest.mark.parametrize(
    ("empty", "shape"), [([], (0, 0)), (np.zeros((0, 8), np.float32), (0, 8)), (np.zeros((0, 0)), (0, 0))]
)
def test_V1_zero_rows_give_an_empty_result_and_run_nothing(serve, empty, shape):
    servable = Servable(
        lambda x: {"same": x, "mean": x.mean(1)[:, None] * np.ones(5, np.float32)},
        inputs={"x": "float32[n]"},
        limits={"n": 8, "batch": 2},
    )
    server, device = serve(servable)
    if np.ndim(empty) == 1:  # a flat empty list is one item without elements
        with pytest.raises(BadTensor, match="must not be empty"):
            server(empty)
        return
    out = server(empty)
    assert (out["same"].shape, out["mean"].shape) == (shape, (0, 5))
    assert out["same"].dtype == np.float32
    assert device.runs == []


@pytest.mark.parametrize(
    ("args", "inputs", "error", "says"),
    [
        (([1.0], [2.0]), {}, TypeError, r"takes the inputs \['x'\]; got 2 positional"),
        (([1.0],), {"x": [1.0]}, TypeError, "takes the inputs"),
        ((), {}, BadTensor, "'x' is missing"),
        ((), {"y": [1.0]}, BadTensor, "unknown"),
        (([[1.0], [1.0, 2.0]],), {}, BadTensor, "rectangular array.*use map"),
        ((np.ones((2, 2, 2)),), {}, BadTensor, "row 0: .*dims"),
    ],
)
def test_calls_that_make_no_sense(serve, doubling, args, inputs, error, says):
    server, _ = serve(doubling())
    with pytest.raises(error, match=says):
        server(*args, **inputs)


def test_inputs_with_different_row_counts(serve):
    servable = Servable(
        lambda a, b: a + b, inputs={"a": "float32[n]", "b": "float32[n]"}, limits={"n": 8, "batch": 2}
    )
    server, _ = serve(servable)
    with pytest.raises(TypeError, match=r"same number of rows; got {'a': 3, 'b': 2}"):
        server(np.ones((3, 2)), np.ones((2, 2)))


@pytest.mark.anyio
async def test_submit_is_the_same_for_asyncio(serve, doubling):
    server, _ = serve(doubling())
    assert np.array_equal(await server.submit([1.0, 2.0], priority=1, timeout_s=30.0), [2.0, 4.0])
    assert (await server.submit(np.ones((3, 2)))).shape == (3, 2)


# -- map -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        QueueLimits(rows=5),
        QueueLimits(rows=1),
        QueueLimits(rows=64, elements=40),
        QueueLimits(rows=64, bytes=128),
        QueueLimits(),
    ],
)
def test_map_sends_more_than_the_queue_holds(serve, doubling, limits):
    server, _ = serve(doubling(), queue=limits, max_request_rows=min(limits.rows, 64))
    items = [item(index, 1 + index % 32) for index in range(200)]
    answers = server.map(items)
    assert [len(one) for one in answers] == [1 + index % 32 for index in range(200)]
    assert [one[0] for one in answers] == [2.0 * index for index in range(200)]
    assert server.map([]) == []
    assert server.load()["waiting_rows"] == 0


def test_map_leaves_room_for_others(serve, doubling):
    server, device = serve(doubling(batch=4), max_request_rows=2048)
    device.hold()
    thread = threading.Thread(target=server.map, args=([item(1.0)] * 2000,))
    thread.start()
    assert device.held.wait(20.0)
    assert server.load()["waiting_rows"] <= 32
    device.release()
    thread.join(60.0)


def test_map_stops_at_the_first_error_and_leaves_nothing_behind(serve, doubling):
    def run(bucket, inputs):
        if (inputs["x"] == 666).any():
            raise ValueError("cursed")
        return [inputs["x"] * 2]

    server, _ = serve(doubling(batch=4), run=run)
    items = [item(index) for index in range(100)]
    items[50] = item(666.0)
    with pytest.raises(ModelError, match="cursed"):
        server.map(items)
    assert server._dispatcher.wait_idle(20.0)
    assert server.load()["waiting_rows"] == 0


def test_map_with_a_queue_full_of_others_is_overload(serve, doubling):
    server, device = serve(doubling(batch=1), queue=QueueLimits(rows=2), max_request_rows=2)
    device.hold()
    first = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    others = [server.model().run_threaded([item()]) for _ in range(2)]
    with pytest.raises(Overloaded):
        server.map([item()] * 4)
    device.release()
    for future in (first, *others):
        future.result(20.0)


# -- life ----------------------------------------------------------------------------------------------


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


# -- warm-up -------------------------------------------------------------------------------------------


class Compiler:
    """Compiles like the fake device, but waits for a permit for each bucket, and fails some."""

    def __init__(self, fails=(), gated=False):
        self.device = FakeDevice()
        self.fails = set(fails)
        self.permits = threading.Semaphore(0)
        self.gated = gated

    def __call__(self, servable, bucket, leaves):
        if self.gated and not self.permits.acquire(timeout=30.0):
            raise TimeoutError
        if str(bucket) in self.fails:
            raise CompileError(f"bucket {bucket} is too much")
        return self.device.compile(servable, bucket, leaves)


@pytest.fixture
def warming(request, doubling):
    """Starts a server whose compiles wait for permits."""

    def make(*servables, fails=(), gated=True, **options):
        compiler = Compiler(fails, gated)
        server = Server(*servables, compile_program=compiler, **options)

        def end():
            for _ in range(1000):
                compiler.permits.release()
            server.close(0.0)

        request.addfinalizer(end)
        return server.start(), compiler

    return make


def test_W2_a_failed_bucket_is_named_at_once_and_not_after_a_timeout(warming, doubling):
    servable = doubling(batch=4, scheme=[32])  # 1x32, 2x32, 4x32
    server, compiler = warming(servable, fails=["2x32"])
    compiler.permits.release()
    compiler.permits.release()
    with pytest.raises(WarmupError, match=r"2x32.*is too much"):
        server.wait_ready(600.0)  # the third compile still waits for its permit
    status = server.status()
    assert status["state"] == "failed"
    assert list(status["failed"]) == ["double 2x32"]
    assert "too much" in status["failed"]["double 2x32"]
    assert not server.ready
    assert server.live
    with pytest.raises(NotReady):
        server([1.0])


def test_W2_the_other_buckets_serve_when_coverage_is_enough(warming, doubling):
    server, compiler = warming(
        doubling(batch=4, scheme=[32]), fails=["2x32"], gated=False, ready_when="coverage"
    )
    server.wait_ready(60.0)
    server._warmup._thread.join(20.0)
    assert server.ready
    status = server.status()
    assert (status["state"], status["done"], status["total"]) == ("ready", 2, 3)
    assert list(status["failed"]) == ["double 2x32"]
    compiler.device.runs.clear()
    assert np.array_equal(server(np.ones((7, 3))), np.full((7, 3), 2.0))
    assert all(str(run.bucket) != "2x32" for run in compiler.device.runs)


def test_W2_coverage_that_cannot_be_reached_is_named_at_once(warming, doubling):
    servable = doubling(batch=4, scheme=[32])
    server, compiler = warming(servable, fails=["1x32"], ready_when="coverage")
    compiler.permits.release()
    with pytest.raises(WarmupError, match=r"1x32.*is too much"):
        server.wait_ready(600.0)
    assert server.status()["state"] == "failed"


def test_W3_progress_is_seen_and_coverage_is_enough_to_answer(warming, doubling):
    steps = []
    server, compiler = warming(
        doubling(batch=4, scheme=[32]),
        ready_when="coverage",
        on_progress=lambda name, step: steps.append((name, str(step.bucket), step.done, step.total)),
    )
    assert (server.status()["state"], server.status()["done"]) == ("warming", 0)
    assert server.live
    compiler.permits.release()
    server.wait_ready(20.0)
    assert server.status()["done"] == 1
    assert np.array_equal(server(np.ones((2, 3))), np.full((2, 3), 2.0))
    compiler.permits.release()
    compiler.permits.release()
    server._warmup._thread.join(20.0)
    assert steps == [("double", "1x32", 1, 3), ("double", "2x32", 2, 3), ("double", "4x32", 3, 3)]
    assert server.status()["state"] == "ready"


def test_all_models_get_their_covering_bucket_before_any_gets_the_rest(warming, doubling):
    steps = []
    server, _ = warming(
        doubling(batch=2, scheme=[32], name="a"),
        doubling(batch=2, scheme=[32], name="b"),
        ready_when="coverage",
        gated=False,
        on_progress=lambda name, step: steps.append(f"{name} {step.bucket}"),
    )
    server.wait_ready(20.0)
    server._warmup._thread.join(20.0)
    assert steps == ["a 1x32", "b 1x32", "a 2x32", "b 2x32"]


def test_wait_ready_gives_up_at_its_timeout(doubling, request):
    clock, compiler = ManualClock(), Compiler(gated=True)
    server = Server(doubling(), compile_program=compiler, clock=clock).start()
    errors = []

    def wait():
        try:
            server.wait_ready(5.0)
        except NotReady as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        clock.advance(5.0)
        thread.join(0.05)
    assert re.search(r"within 5 s; 0 of \d+ programs are warm", errors[0])
    for _ in range(100):
        compiler.permits.release()
    server.close(0.0)


def test_close_during_warm_up_ends_it_and_wakes_who_waits(warming, doubling):
    server, compiler = warming(doubling())
    errors = []

    def wait():
        try:
            server.wait_ready(600.0)
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    closer = threading.Thread(target=server.close, args=(0.0,))
    closer.start()
    thread.join(20.0)
    assert len(errors) == 1
    compiler.permits.release()  # the compile in hand is waited for
    closer.join(20.0)
    assert not closer.is_alive()
    assert server.status()["done"] <= 1


def test_a_progress_callback_that_fails_is_not_lost(warming, doubling):
    def fails(name, step):
        raise RuntimeError("no terminal")

    server, _ = warming(doubling(), gated=False, on_progress=fails)
    with pytest.raises(WarmupError, match="warm-up ended early: no terminal"):
        server.wait_ready(20.0)
    assert server.status()["error"] == "no terminal"


# -- health and load -----------------------------------------------------------------------------------


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


def test_M2_all_outcomes_add_up(serve, doubling):
    clock = ManualClock()
    server, device = serve(doubling(batch=4), clock=clock, queue=QueueLimits(rows=100), max_request_rows=100)
    model = server.model()
    device.hold()
    first = model.run_threaded([item()])
    assert device.held.wait(20.0)
    counts = dict.fromkeys(("done", "cancelled", "expired", "refused"), 0)
    futures = []
    for index in range(200):
        try:
            futures.append(model.run_threaded([item(index)], timeout_s=1.0 if index % 3 == 0 else None))
        except Overloaded:
            counts["refused"] += 1
    for future in futures[1::3]:
        future.cancel()
    clock.advance(2.0)
    device.release()
    for future in futures:
        try:
            future.result(20.0)
            counts["done"] += 1
        except CancelledError:
            counts["cancelled"] += 1
        except DeadlineExceeded:
            counts["expired"] += 1
    assert first.result(20.0)
    assert counts == {"refused": 100, "cancelled": 33, "expired": 34, "done": 33}
    assert server._dispatcher.wait_idle(20.0)
    assert set(server.load().values()) == {0}


# -- several models ------------------------------------------------------------------------------------


def test_two_models_in_one_server(serve, doubling):
    tripling = Servable(
        lambda x: x * 3, inputs={"x": "float32[length]"}, limits={"batch": 2, "length": 8}, name="triple"
    )
    server, _ = serve(doubling(), tripling)
    assert np.array_equal(server([1.0], model="double"), [2.0])
    assert np.array_equal(server([1.0], model="triple"), [3.0])
    assert server.map([item()] * 3, model="triple")[2][0] == 3.0
    with pytest.raises(UnknownModel, match=r"\['double', 'triple'\]; got None"):
        server([1.0])
    with pytest.raises(UnknownModel, match="got 'quadruple'"):
        server([1.0], model="quadruple")


def test_a_flood_for_one_model_does_not_starve_the_other(serve, doubling):
    server, device = serve(doubling(batch=1, name="busy"), doubling(batch=1, name="calm"))
    busy, calm = server.model("busy"), server.model("calm")
    device.hold()
    first = busy.run_threaded([item()])
    assert device.held.wait(20.0)
    flood = [busy.run_threaded([item()]) for _ in range(500)]
    wanted = calm.run_threaded([item(7.0)])
    done_before = []
    wanted.add_done_callback(lambda _: done_before.append(sum(one.done() for one in flood)))
    device.release()
    assert wanted.result(20.0)[0][0][0] == 14.0
    assert done_before[0] <= 2
    for future in (first, *flood):
        future.result(20.0)


def test_too_many_rows_in_one_request(serve, doubling):
    server, _ = serve(doubling(), max_request_rows=10)
    with pytest.raises(TooManyRows, match="at most 10 rows; got 11"):
        server(np.ones((11, 2)))
