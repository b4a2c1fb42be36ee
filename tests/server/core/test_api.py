"""The server as a user calls it: one item, rows, many items, several models."""

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from servax.jit_cache import Servable
from servax.server import BadTensor, DeadlineExceeded, ModelError, Overloaded, QueueLimits, UnknownModel
from servax.server.batching.clock import ManualClock


def item(value=1.0, length=3):
    return {"x": np.full(length, value, np.float32)}


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
        ((3.0,), {}, BadTensor, "'x' has 1 dims for one item and one more for rows; got 0"),
        ((None,), {}, BadTensor, "'x' has 1 dims for one item"),
        (([[1.0], [2.0]],), {"y": 1}, BadTensor, "unknown"),
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


# -- health and load -----------------------------------------------------------------------------------


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
