"""The device thread over a fake device that obeys the test: padding, launches, batches in flight."""

import threading

import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.server import ModelError
from servax.server.batching.clock import ManualClock

# -- batches -------------------------------------------------------------------------------------------


def test_Q8_what_queued_behind_a_held_device_runs_as_one_batch(serve, doubling, send, value_of, hold_one):
    server, device = serve(doubling(batch=8))
    first = hold_one(server, device)
    futures = send(server, *range(1, 6))
    assert server.load()["waiting_rows"] == 5
    device.release()
    assert [value_of(one) for one in (first, *futures)] == [1.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert [run.bucket for run in device.runs[1:]] == [Bucket(("batch", "length"), (8, 8))]


def test_B6_nine_rows_run_as_eight_and_one(serve, doubling):
    server, device = serve(doubling(batch=8, length=128))
    out = server(np.arange(9 * 100, dtype=np.float32).reshape(9, 100))
    assert np.array_equal(out, 2 * np.arange(9 * 100).reshape(9, 100))
    assert [str(run.bucket) for run in device.runs] == ["8x128", "1x128"]


def test_B8_seventeen_rows_come_back_in_order(serve, doubling):
    server, device = serve(doubling(batch=8))
    out = server(np.arange(17, dtype=np.float32)[:, None])
    assert np.array_equal(out[:, 0], 2 * np.arange(17))
    assert [run.bucket.rows for run in device.runs] == [8, 8, 1]


def test_M3_a_record_says_what_ran(serve, doubling, send, hold_one):
    records = []
    servable = doubling(batch=4, length=32, scheme=[32])
    server, device = serve(servable, on_batch=records.append)
    first = hold_one(server, device)
    futures = [send(server, 1, length=length)[0] for length in (5, 9, 20)]
    device.release()
    for future in (first, *futures):
        future.result(20.0)
    server.close()
    record = records[1]
    assert (str(record.bucket), record.rows, record.real, record.computed) == ("4x32", 3, 34, 128)
    assert record.reason in ("full", "window", "deadline", "idle")
    assert len(record.queued_s) == 3
    assert min(record.queued_s) >= 0
    assert len(records) == 2


def test_P2_nothing_lives_into_the_next_run(serve, doubling):
    server, device = serve(doubling(batch=8))
    rng = np.random.default_rng(0)
    counts = [7, 8, *map(int, rng.integers(1, 9, 1000))]
    for rows in counts:
        x = rng.normal(size=(rows, int(rng.integers(1, 33)))).astype(np.float32)
        assert np.array_equal(server(x), 2 * x)
    for run in device.runs:
        assert run.inputs["x"].shape == run.bucket.sizes
    assert sum((run.inputs["x"] != 0).any(axis=1).sum() for run in device.runs) == sum(counts)


def test_padding_is_clean_whatever_ran_before(serve, doubling):
    server, device = serve(doubling(batch=4, length=8, scheme=[8]))
    server(np.full((4, 8), 9.0, np.float32))
    server(np.full((3, 5), 1.0, np.float32))
    x = device.runs[-1].inputs["x"]
    assert x.shape == (4, 8)
    assert (x[:3, :5] == 1).all()
    assert not x[3:].any()
    assert not x[:, 5:].any()


def test_P5_replies_share_nothing(serve, doubling, send, hold_one):
    server, device = serve(doubling(batch=8))
    first = hold_one(server, device)
    futures = send(server, 1, 2, 3)
    device.release()
    first.result(20.0)
    replies = [one.result(20.0)[0][0] for one in futures]
    for index, reply in enumerate(replies):
        assert reply.flags.owndata
        assert reply.flags.writeable
        reply[:] = -1
        assert [float(other[0]) for other in replies[index + 1 :]] == [4.0, 6.0][index:]


def test_P6_a_wrong_number_of_rows_reaches_every_caller_without_a_retry(
    serve, doubling, send, value_of, hold_one
):
    cut = threading.Event()

    def run(bucket, inputs):
        return [(inputs["x"] * 2)[: 3 if cut.is_set() else None]]

    server, device = serve(doubling(batch=4), run=run)
    first = hold_one(server, device)
    futures = send(server, 1, 2, 3, 4)
    cut.set()
    device.release()
    assert value_of(first) == 1.0
    for future in futures:
        with pytest.raises(ModelError, match="expected 4 rows, got 3"):
            future.result(20.0)
    assert len(device.runs) == 2
    cut.clear()
    assert value_of(send(server, 21)[0]) == 42.0


# -- several batches in flight -------------------------------------------------------------------------


def test_with_depth_two_the_next_batch_is_launched_while_one_runs(serve, doubling, send, value_of, hold_one):
    server, device = serve(doubling(batch=1), depth=2)
    first = hold_one(server, device)
    assert len(device.runs) == 1
    device.release()
    first.result(20.0)
    device.hold()
    futures = send(server, 1, 2, 3)
    assert device.held.wait(20.0)
    device.release()
    assert [value_of(one) for one in futures] == [2.0, 4.0, 6.0]
    assert server.load()["running_rows"] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_is_timed_from_when_the_device_was_free_for_it(serve, doubling, depth):
    clock = ManualClock()

    def run(bucket, inputs):
        clock.advance(0.1)
        return [inputs["x"] * 2]

    server, device = serve(doubling(batch=1, length=8), run=run, depth=depth, clock=clock)
    device.hold()
    futures = [server.model().run_threaded([{"x": np.ones(3, np.float32)}]) for _ in range(6)]
    assert device.held.wait(20.0)
    device.release()
    for future in futures:
        future.result(20.0)
    server._dispatcher.wait_idle(20.0)
    assert list(server.model().cost.measured().values()) == [pytest.approx(0.1)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_P5_hundreds_of_requests_in_flight_get_their_own_answers(serve, doubling, depth, send, value_of):
    server, _ = serve(doubling(batch=8), depth=depth)
    futures = send(server, *range(1000))
    assert [value_of(one) for one in futures] == [2.0 * value for value in range(1000)]
    assert server.load() == {
        "waiting_rows": 0,
        "waiting_elements": 0,
        "waiting_bytes": 0,
        "running_rows": 0,
    }


def test_staging_is_reused(serve, doubling):
    server, _ = serve(doubling(batch=4, length=8), depth=2)
    for _ in range(50):
        server([1.0, 2.0])
    assert all(len(free) <= 2 for free in server.model()._staging.values())
