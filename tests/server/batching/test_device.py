"""The device thread: padding, launches, failures; over a fake device that obeys the test, and over JAX."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import SealedError, Servable
from servax.server import ModelError, Server, Unavailable
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice

POISON = 666.0


def item(value, length=3):
    return {"x": np.full(length, value, np.float32)}


def ask(server, *values, length=3, name=None, **options):
    """One request for each value, all posted before the first is answered if the device is held."""
    model = server.model(name)
    return [model.run_threaded([item(value, length)], **options) for value in values]


def value_of(future):
    """The one value of a one-row answer of the doubling model."""
    ((leaf,),) = future.result(20.0)
    assert leaf.min() == leaf.max()
    return float(leaf[0])


def hold_one(server, device):
    """Occupy the device with one request."""
    device.hold()
    (first,) = ask(server, 0.5)
    assert device.held.wait(20.0)
    return first


def poisoned(bucket, inputs):
    if (inputs["x"][:, 0] == POISON).any():
        raise ValueError("row 666 is cursed")
    return [inputs["x"] * 2]


# -- batches -------------------------------------------------------------------------------------------


def test_Q8_what_queued_behind_a_held_device_runs_as_one_batch(serve, doubling):
    server, device = serve(doubling(batch=8))
    first = hold_one(server, device)
    futures = ask(server, *range(1, 6))
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


def test_B8_a_failing_piece_fails_its_request_once_and_nobody_else(serve, doubling):
    server, device = serve(doubling(batch=8), run=poisoned)
    rows = np.zeros((17, 3), np.float32)
    rows[10] = POISON
    first = hold_one(server, device)
    split = server.model().run_threaded([{"x": row} for row in rows])
    (other,) = ask(server, 7)
    device.release()
    with pytest.raises(ModelError, match="666 is cursed"):
        split.result(20.0)
    assert (value_of(first), value_of(other)) == (1.0, 14.0)
    assert server.load()["waiting_rows"] == 0


def test_M3_a_record_says_what_ran(serve, doubling):
    records = []
    servable = doubling(batch=4, length=32, scheme=[32])
    server, device = serve(servable, on_batch=records.append)
    first = hold_one(server, device)
    futures = [ask(server, 1, length=length)[0] for length in (5, 9, 20)]
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


def test_P5_replies_share_nothing(serve, doubling):
    server, device = serve(doubling(batch=8))
    first = hold_one(server, device)
    futures = ask(server, 1, 2, 3)
    device.release()
    first.result(20.0)
    replies = [one.result(20.0)[0][0] for one in futures]
    for index, reply in enumerate(replies):
        assert reply.flags.owndata
        assert reply.flags.writeable
        reply[:] = -1
        assert [float(other[0]) for other in replies[index + 1 :]] == [4.0, 6.0][index:]


def test_P6_a_wrong_number_of_rows_reaches_every_caller_without_a_retry(serve, doubling):
    cut = threading.Event()

    def run(bucket, inputs):
        return [(inputs["x"] * 2)[: 3 if cut.is_set() else None]]

    server, device = serve(doubling(batch=4), run=run)
    first = hold_one(server, device)
    futures = ask(server, 1, 2, 3, 4)
    cut.set()
    device.release()
    assert value_of(first) == 1.0
    for future in futures:
        with pytest.raises(ModelError, match="expected 4 rows, got 3"):
            future.result(20.0)
    assert len(device.runs) == 2
    cut.clear()
    assert value_of(ask(server, 21)[0]) == 42.0


# -- failures ------------------------------------------------------------------------------------------


def test_F1_the_culprit_is_found_and_the_others_are_answered(serve, doubling):
    server, device = serve(doubling(batch=4), run=poisoned)
    first = hold_one(server, device)
    futures = ask(server, 1, 2, POISON, 4)
    device.release()
    with pytest.raises(ModelError, match="failed on this request in bucket 4x8: row 666 is cursed"):
        futures[2].result(20.0)
    assert [value_of(futures[index]) for index in (0, 1, 3)] == [2.0, 4.0, 8.0]
    assert value_of(first) == 1.0
    assert len(device.runs) - 2 <= 4


def test_F1_a_bad_batch_costs_a_bounded_number_of_runs(serve, doubling):
    server, device = serve(doubling(batch=32), run=poisoned)
    first = hold_one(server, device)
    futures = ask(server, *[POISON] * 32)
    device.release()
    for future in futures:
        with pytest.raises(ModelError):
            future.result(20.0)
    assert value_of(first) == 1.0
    assert len(device.runs) - 2 <= 20


@pytest.mark.parametrize("place", [0, 13, 31])
def test_F1_one_culprit_in_a_large_batch(serve, doubling, place):
    server, device = serve(doubling(batch=32), run=poisoned)
    first = hold_one(server, device)
    values = [float(value) for value in range(32)]
    values[place] = POISON
    futures = ask(server, *values)
    device.release()
    first.result(20.0)
    for index, future in enumerate(futures):
        if index == place:
            with pytest.raises(ModelError):
                future.result(20.0)
        else:
            assert value_of(future) == 2 * index
    assert len(device.runs) - 2 <= 10


def test_errors_are_not_shared_between_callers(serve, doubling):
    server, device = serve(doubling(batch=4), run=poisoned)
    first = hold_one(server, device)
    futures = ask(server, POISON, POISON)
    device.release()
    first.result(20.0)
    errors = [one.exception(20.0) for one in futures]
    assert errors[0] is not errors[1]
    assert isinstance(errors[0].__cause__, ValueError)


def test_F5_a_bucket_that_runs_out_of_memory_is_left_for_smaller_ones(serve, doubling):
    full = threading.Event()

    def run(bucket, inputs):
        if full.is_set() and bucket.rows == 8:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return [inputs["x"] * 2]

    server, device = serve(doubling(batch=8), run=run)
    first = hold_one(server, device)
    futures = ask(server, *range(8))
    full.set()
    device.release()
    assert [value_of(one) for one in (first, *futures)] == [1.0, *(2.0 * value for value in range(8))]
    assert [run.bucket.rows for run in device.runs] == [1, 8, 4, 4]
    assert server.ready


@pytest.mark.parametrize("stage", ["pad", "run", "scatter", "record"])
def test_F2_a_failure_in_a_stage_ends_no_thread(serve, doubling, stage, monkeypatch, caplog):
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
    (bad,) = ask(server, 1)
    if stage == "record":
        assert value_of(bad) == 2.0
    else:
        with pytest.raises(ModelError, match=f"{stage} is broken"):
            bad.result(20.0)
    broken.clear()
    assert value_of(ask(server, 2)[0]) == 4.0
    assert server.ready
    assert server.live


def test_F3_when_the_loop_dies_health_says_so_and_nobody_hangs(serve, doubling, monkeypatch, caplog):
    server, device = serve(doubling(batch=1))
    first = hold_one(server, device)
    waiting = ask(server, 1, 2)
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


# -- several batches in flight -------------------------------------------------------------------------


def test_with_depth_two_the_next_batch_is_launched_while_one_runs(serve, doubling):
    server, device = serve(doubling(batch=1), depth=2)
    first = hold_one(server, device)
    assert len(device.runs) == 1
    device.release()
    first.result(20.0)
    device.hold()
    futures = ask(server, 1, 2, 3)
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
def test_P5_hundreds_of_requests_in_flight_get_their_own_answers(serve, doubling, depth):
    server, _ = serve(doubling(batch=8), depth=depth)
    futures = ask(server, *range(1000))
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


# -- JAX -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    """A server over real programs: doubles x, and counts the real elements of a row."""

    def apply(params, x, mask):
        total = jnp.sum(jnp.where(mask, x, 0), axis=1)
        return {"twice": x * params["factor"], "total": total, "shifted": jnp.pad(x, ((0, 0), (1, 0)))}

    servable = Servable(
        apply,
        {"factor": np.float32(2)},
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"batch": 4, "length": 16},
        scheme="powers_of_two:8",
    )
    with Server(servable) as server:
        yield server


def test_every_length_and_row_count_is_right_on_jax(real, compiles):
    rng = np.random.default_rng(1)
    with compiles.none():
        for rows in range(1, 10):
            for length in (1, 7, 8, 9, 16):
                x = rng.normal(size=(rows, length)).astype(np.float32)
                out = real(x)
                assert np.array_equal(out["twice"], 2 * x)
                assert np.allclose(out["total"], x.sum(1), rtol=1e-5, atol=1e-5)
                assert np.array_equal(out["shifted"], np.pad(x, ((0, 0), (1, 0))))


def test_C2_random_requests_compile_nothing(real, compiles):
    rng = np.random.default_rng(2)
    items = [{"x": rng.normal(size=int(n)).astype(np.float32)} for n in rng.integers(1, 17, 3000)]
    with compiles.none():
        answers = real.map(items)
    assert all(
        np.array_equal(answer["twice"], 2 * one["x"]) for one, answer in zip(items, answers, strict=True)
    )


def test_C2_off_the_grid_nothing_runs_and_nothing_compiles(real, compiles):
    with compiles.none(), pytest.raises(SealedError, match="bucket 5x16 is not warm"):
        real.model().cache.get(Bucket(("batch", "length"), (5, 16)))


def test_C2_a_sealed_process_still_answers():
    servable = Servable(lambda x: x * 2, inputs={"x": "float32[length]"}, limits={"batch": 2, "length": 8})
    with Server(servable, seal=True) as server:
        assert np.array_equal(server([1.0, 2.0]), [2.0, 4.0])
    jax.jit(lambda x: x + 1)(1.0)  # the seal is lifted with the server


def test_F1_a_callback_that_raises_inside_xla(doubling):
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
        futures = ask(server, 1, POISON, 3)
        assert [value_of(futures[index]) for index in (0, 2)] == [2.0, 6.0]
        with pytest.raises(ModelError):
            futures[1].result(20.0)
        assert value_of(ask(server, 5)[0]) == 10.0


def test_the_fake_device_computes_what_jax_does(doubling):
    device = FakeDevice()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Server(doubling(), compile_program=device.compile) as fake, Server(doubling()) as true:
        assert np.array_equal(fake(x), true(x))


@pytest.mark.parametrize("places", [(0, 11, 22), (3, 4, 17, 30), (1, 9, 14, 20, 27, 31)])
def test_F1_several_culprits_hurt_nobody_else(serve, doubling, places):
    server, device = serve(doubling(batch=32), run=poisoned)
    first = hold_one(server, device)
    values = [POISON if place in places else float(place) for place in range(32)]
    futures = ask(server, *values)
    device.release()
    first.result(20.0)
    for place, future in enumerate(futures):
        if place in places:
            with pytest.raises(ModelError):
                future.result(20.0)
        else:
            assert value_of(future) == 2 * values[place]
