"""The door of a model: what it refuses, and who waits how."""

import asyncio
import gc
import math
import threading
import weakref

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
    QueueLimits,
    ServerError,
    TooLong,
    TooManyRows,
)
from servax.server.batching.clock import ManualClock, MonotonicClock
from servax.server.batching.request import PRIORITIES
from servax.server.hosting.door import allowed_s


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


# -- the door ------------------------------------------------------------------------------------------


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


# -- asyncio -------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_rows_of_different_sizes_in_one_request(serve, doubling):
    server, _ = serve(doubling())
    rows = [item(index, 1 + index) for index in range(20)]
    answers = await server.model().submit(rows)
    assert [list(one["output"]) for one in answers] == [[2.0 * i] * (1 + i) for i in range(20)]
    assert await server.model().submit([]) == []


@pytest.mark.anyio
@pytest.mark.parametrize("priority", [0, *PRIORITIES])
async def test_priorities_through_the_transports_door(serve, doubling, priority):
    server, _ = serve(doubling())
    (answer,) = await server.model().submit([item()], priority=priority, timeout_s=0)
    assert answer["output"][0] == 2.0


async def until(condition):
    """Let the loop run until something holds; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_X1_cancelled_tasks_free_their_places_at_once(serve, doubling):
    server, device = serve(doubling(batch=1), queue=QueueLimits(rows=100), max_request_rows=100)
    model = server.model()
    device.hold()
    first = asyncio.create_task(model.run([item()]))
    await asyncio.to_thread(device.held.wait, 20.0)
    tasks = [asyncio.create_task(model.run([item(index)])) for index in range(100)]
    await until(lambda: server.load()["waiting_rows"] == 100)
    with pytest.raises(Overloaded):
        await model.run([item()])
    for task in tasks[1:]:
        task.cancel()
    results = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in results)
    assert server.load()["waiting_rows"] == 1
    more = [asyncio.create_task(model.run([item()])) for _ in range(99)]
    await until(lambda: server.load()["waiting_rows"] == 100)
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    device.release()
    await asyncio.gather(first, tasks[0])
    assert len(device.runs) == 2


@pytest.mark.anyio
async def test_X2_one_of_three_is_cancelled_while_their_batch_runs(serve, doubling):
    server, device = serve(doubling(batch=4, scheme=[32]))
    model = server.model()
    device.hold()
    first = asyncio.create_task(model.run([item()]))
    await asyncio.to_thread(device.held.wait, 20.0)
    tasks = [asyncio.create_task(model.run([item(index)])) for index in range(3)]
    await until(lambda: server.load()["waiting_rows"] == 3)
    device.release(1)
    await first
    await asyncio.to_thread(device.held.wait, 20.0)
    assert server.load()["running_rows"] == 3
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    device.release()
    assert [float((await tasks[index])[0][0][0]) for index in (0, 2)] == [0.0, 4.0]
    for value in range(10):
        assert (await model.run([item(value)]))[0][0][0] == 2.0 * value
    assert server.load()["running_rows"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("depth", [1, 2])
async def test_X3_cancelling_at_random_leaves_nothing_behind(serve, doubling, depth):
    server, _ = serve(doubling(batch=4), depth=depth, queue=QueueLimits(rows=64), max_request_rows=64)
    model, rng = server.model(), np.random.default_rng(3)

    async def client(value):
        rows = [item(value)] * int(rng.integers(1, 7))
        try:
            async with asyncio.timeout(float(rng.choice([0.0, 0.001, 0.005, 30.0]))):
                answers = await model.run(rows, priority=int(rng.integers(1, 10)))
            assert [one[0][0] for one in answers] == [2.0 * value] * len(rows)
        except (TimeoutError, Overloaded):
            pass

    for _ in range(10):
        await asyncio.gather(*(client(float(value)) for value in range(60)))
    answers = await asyncio.gather(*(model.run([item(value)]) for value in range(64)))
    assert [one[0][0][0] for one in answers] == [2.0 * value for value in range(64)]
    await asyncio.to_thread(server._dispatcher.wait_idle, 20.0)
    assert set(server.load().values()) == {0}
    assert server.live


@pytest.mark.anyio
async def test_a_timeout_in_asyncio_frees_the_place(serve, doubling):
    server, device = serve(doubling(batch=1))
    device.hold()
    first = asyncio.create_task(server.submit([1.0]))
    await asyncio.to_thread(device.held.wait, 20.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await server.submit([1.0])
    assert server.load()["waiting_rows"] == 0
    device.release()
    await first


def test_a_loop_that_closes_before_its_answer(serve, doubling):
    server, device = serve(doubling(batch=1))
    device.hold()
    loop = asyncio.new_event_loop()

    async def post():
        task = asyncio.ensure_future(server.model().run([item()]))
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(post())
    assert device.held.wait(20.0)
    loop.close()
    device.release()
    assert np.array_equal(server([1.0]), [2.0])
    assert server.load()["running_rows"] == 0
    task._log_destroy_pending = False


def test_loops_are_not_kept_alive(serve, doubling):
    server, _ = serve(doubling())

    async def call():
        await server.submit([1.0])
        return weakref.ref(asyncio.get_running_loop())

    references = [asyncio.run(call()) for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_P5_every_thread_and_loop_gets_its_own_answer(serve, doubling):
    server, _ = serve(doubling())
    wrong = []

    def in_thread(value):
        out = server(np.full((1 + value % 3, 2), value, np.float32))
        if out.shape != (1 + value % 3, 2) or not (out == 2 * value).all():
            wrong.append(value)

    def in_loop(value):
        async def calls():
            return await asyncio.gather(*(server.submit([float(value + k)]) for k in range(10)))

        if [float(one[0]) for one in asyncio.run(calls())] != [2.0 * (value + k) for k in range(10)]:
            wrong.append(value)

    threads = [threading.Thread(target=in_thread, args=(value,)) for value in range(200)]
    threads += [threading.Thread(target=in_loop, args=(1000 * value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == []


# -- threads -------------------------------------------------------------------------------------------


def test_a_cancelled_future_frees_its_place(serve, doubling):
    server, device = serve(doubling(batch=1))
    device.hold()
    first = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    second = server.model().run_threaded([item()])
    assert server.load()["waiting_rows"] == 1
    assert second.cancel()
    assert server.load()["waiting_rows"] == 0
    assert first.cancel()
    device.release()
    assert np.array_equal(server([1.0]), [2.0])
    assert not device.held.is_set() or len(device.runs) == 2


def test_Q1_a_deadline_while_the_device_is_held(serve, doubling):
    clock = ManualClock()
    server, device = serve(doubling(batch=1), clock=clock)
    device.hold()
    first = server.model().run_threaded([item()])
    assert device.held.wait(20.0)
    second = server.model().run_threaded([item()], timeout_s=0.2)
    clock.advance(0.1)
    assert not second.done()
    clock.advance(0.11)
    with pytest.raises(DeadlineExceeded, match="still waiting"):
        second.result(20.0)
    assert not first.done()
    device.release()
    assert first.result(20.0)[0][0][0] == 2.0
    assert len(device.runs) == 1


def test_Q10_a_wall_clock_that_steps_back_changes_nothing(serve, doubling, monkeypatch):
    server, device = serve(doubling(batch=1), clock=MonotonicClock())
    device.hold()
    first = server.model().run_threaded([item()], timeout_s=30.0)
    assert device.held.wait(20.0)
    second = server.model().run_threaded([item()], timeout_s=30.0)
    monkeypatch.setattr("time.time", lambda: -3600.0)
    third = server.model().run_threaded([item()], timeout_s=30.0)
    device.release()
    assert [one.result(20.0)[0][0][0] for one in (first, second, third)] == [2.0] * 3


def test_everything_a_model_refuses_is_a_server_error():
    for error in (TooLong, BadTensor, NonFiniteInput, TooManyRows, NotReady, Overloaded, Closed):
        assert issubclass(error, ServerError)


# -- buckets -------------------------------------------------------------------------------------------


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
