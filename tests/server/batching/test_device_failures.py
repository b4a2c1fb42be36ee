"""The device thread and what fails: a model, a row, a stage, the thread itself."""

import threading

import jax
import numpy as np
import pytest
from servax.jit_cache import Servable
from servax.server import ModelError, Server, Unavailable

POISON = 666.0


def poisoned(bucket, inputs):
    if (inputs["x"][:, 0] == POISON).any():
        raise ValueError("row 666 is cursed")
    return [inputs["x"] * 2]


def test_B8_a_failing_piece_fails_its_request_once_and_nobody_else(serve, doubling, send, value_of, hold_one):
    server, device = serve(doubling(batch=8), run=poisoned)
    rows = np.zeros((17, 3), np.float32)
    rows[10] = POISON
    first = hold_one(server, device)
    split = server.model().run_threaded([{"x": row} for row in rows])
    (other,) = send(server, 7)
    device.release()
    with pytest.raises(ModelError, match="666 is cursed"):
        split.result(20.0)
    assert (value_of(first), value_of(other)) == (1.0, 14.0)
    assert server.load()["waiting_rows"] == 0


def test_F1_the_culprit_is_found_and_the_others_are_answered(serve, doubling, send, value_of, hold_one):
    server, device = serve(doubling(batch=4), run=poisoned)
    first = hold_one(server, device)
    futures = send(server, 1, 2, POISON, 4)
    device.release()
    with pytest.raises(ModelError, match="failed on this request in bucket 4x8: row 666 is cursed"):
        futures[2].result(20.0)
    assert [value_of(futures[index]) for index in (0, 1, 3)] == [2.0, 4.0, 8.0]
    assert value_of(first) == 1.0
    assert len(device.runs) - 2 <= 4


def test_F1_a_bad_batch_costs_a_bounded_number_of_runs(serve, doubling, send, value_of, hold_one):
    server, device = serve(doubling(batch=32), run=poisoned)
    first = hold_one(server, device)
    futures = send(server, *[POISON] * 32)
    device.release()
    for future in futures:
        with pytest.raises(ModelError):
            future.result(20.0)
    assert value_of(first) == 1.0
    assert len(device.runs) - 2 <= 20


def test_errors_are_not_shared_between_callers(serve, doubling, send, hold_one):
    server, device = serve(doubling(batch=4), run=poisoned)
    first = hold_one(server, device)
    futures = send(server, POISON, POISON)
    device.release()
    first.result(20.0)
    errors = [one.exception(20.0) for one in futures]
    assert errors[0] is not errors[1]
    assert isinstance(errors[0].__cause__, ValueError)


def test_F5_a_bucket_that_runs_out_of_memory_is_left_for_smaller_ones(
    serve, doubling, send, value_of, hold_one
):
    full = threading.Event()

    def run(bucket, inputs):
        if full.is_set() and bucket.rows == 8:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return [inputs["x"] * 2]

    server, device = serve(doubling(batch=8), run=run)
    first = hold_one(server, device)
    futures = send(server, *range(8))
    full.set()
    device.release()
    assert [value_of(one) for one in (first, *futures)] == [1.0, *(2.0 * value for value in range(8))]
    assert [run.bucket.rows for run in device.runs] == [1, 8, 4, 4]
    assert server.ready


@pytest.mark.parametrize("stage", ["pad", "run", "scatter", "record"])
def test_F2_a_failure_in_a_stage_ends_no_thread(serve, doubling, stage, monkeypatch, caplog, send, value_of):
    broken = threading.Event()

    def breaks(function):
        def wrapped(*args, **kwargs):
            if broken.is_set():
                raise RuntimeError(f"{stage} is broken")
            return function(*args, **kwargs)

        return wrapped

    def run(bucket, inputs):
        return [breaks(lambda: inputs["x"] * 2)() if stage == "run" else inputs["x"] * 2]

    on_batch = breaks(lambda record: None) if stage == "record" else None
    server, _ = serve(doubling(), run=run, on_batch=on_batch)
    if stage == "pad":
        from servax.jit_cache import Staging

        monkeypatch.setattr(Staging, "fill", breaks(Staging.fill))
    if stage == "scatter":
        from servax.jit_cache import Outputs

        monkeypatch.setattr(Outputs, "cut", breaks(Outputs.cut))
    broken.set()
    (bad,) = send(server, 1)
    if stage == "record":
        assert value_of(bad) == 2.0
    else:
        with pytest.raises(ModelError, match=f"{stage} is broken"):
            bad.result(20.0)
    broken.clear()
    assert value_of(send(server, 2)[0]) == 4.0
    assert server.ready
    assert server.live


def test_F3_when_the_loop_dies_health_says_so_and_nobody_hangs(
    serve, doubling, monkeypatch, caplog, send, hold_one
):
    server, device = serve(doubling(batch=1))
    first = hold_one(server, device)
    waiting = send(server, 1, 2)
    monkeypatch.setattr(server._dispatcher, "finish", lambda *_: 1 / 0)
    device.release()
    for future in (first, *waiting):
        with pytest.raises(Unavailable, match="the device thread ended with ZeroDivisionError"):
            future.result(20.0)
    assert server._device.join(20.0)
    assert not server.live
    assert not server.ready
    assert server.status()["state"] == "failed"
    assert "division by zero" in server.status()["error"]
    with pytest.raises(Unavailable, match="restart the server"):
        server([1.0])
    with pytest.raises(Unavailable):
        server.wait_ready(5.0)
    assert "the device thread ended" in caplog.text


def test_F1_a_callback_that_raises_inside_xla(doubling, send, value_of):
    def check(x):
        if (x[:, 0] == POISON).any():
            raise ValueError("cursed inside XLA")
        return x * 2

    def apply(x):
        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    servable = Servable(
        apply,
        inputs={"x": "float32[length]"},
        outputs={"output": "float32[length]"},
        limits={"batch": 4, "length": 8},
    )
    with Server(servable) as server:
        futures = send(server, 1, POISON, 3)
        assert [value_of(futures[index]) for index in (0, 2)] == [2.0, 6.0]
        with pytest.raises(ModelError):
            futures[1].result(20.0)
        assert value_of(send(server, 5)[0]) == 10.0


@pytest.mark.parametrize("places", [(0,), (13,), (31,), (0, 11, 22), (3, 4, 17, 30), (1, 9, 14, 20, 27, 31)])
def test_F1_culprits_in_a_large_batch_hurt_nobody_else(serve, doubling, places, send, value_of, hold_one):
    server, device = serve(doubling(batch=32), run=poisoned)
    first = hold_one(server, device)
    values = [POISON if place in places else float(place) for place in range(32)]
    futures = send(server, *values)
    device.release()
    first.result(20.0)
    for place, future in enumerate(futures):
        if place in places:
            with pytest.raises(ModelError):
                future.result(20.0)
        else:
            assert value_of(future) == 2 * values[place]
    assert len(device.runs) - 2 <= 10 * len(places)
