"""Who waits for a model, and how: tasks, loops, threads, and those that leave."""

import asyncio
import threading
import weakref

import numpy as np
import pytest
from servax.server import DeadlineExceeded, Overloaded, QueueLimits
from servax.server.batching.clock import ManualClock, MonotonicClock
from servax.server.batching.request import PRIORITIES


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


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


def test_loops_are_not_kept_alive(serve, doubling, survivors):
    server, _ = serve(doubling())

    async def call():
        await server.submit([1.0])
        return weakref.ref(asyncio.get_running_loop())

    references = [asyncio.run(call()) for _ in range(3)]
    assert survivors(references) == []


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
