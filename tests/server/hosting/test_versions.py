"""A new version in the place of the old one: no error, no mixed batch, nothing left of the old one."""

import gc
import threading
import time
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Servable, WarmupError
from servax.jit_cache.device_memory import resident_bytes
from servax.server import Closed, ConfigError, Server
from servax.server.batching.clock import ManualClock
from servax.server.errors import DeadlineExceeded


def version(number, name="model", apply=None, batches=(1, 4)):
    return Servable(
        apply or (lambda w, *, x: x * 0 + w),
        jnp.full((), float(number), jnp.float32),
        inputs={"x": "float32[length]"},
        limits={"batch": 4, "length": 8},
        scheme={"batch": [*batches], "length": [8]},
        name=name,
        version=str(number),
    )


def test_W7_a_swap_under_load_gives_no_error_and_no_batch_mixes_versions(survivors):
    batches, stop, failures = [], threading.Event(), []
    with Server(version(1), on_batch=batches.append) as server:
        seen = [[] for _ in range(4)]

        def ask(answers):
            while not stop.is_set():
                try:
                    answers.append(set(server(np.zeros((5, 3), np.float32)).ravel().tolist()))
                except Exception as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=ask, args=(answers,)) for answers in seen]
        for thread in threads:
            thread.start()
        old = server.model()
        programs = [weakref.ref(old.cache.get(bucket).executable) for bucket in old.cache.ready()]
        weights = weakref.ref(old.servable.leaves[0])
        while not all(seen):
            server(np.zeros(3, np.float32))
        # Other code: a version of the same would go on with the programs that there are.
        new = server.replace(version(2, apply=lambda w, *, x: w + x * 0))
        assert server.model() is new
        assert new.version == "2"
        done = [len(answers) for answers in seen]
        while not all(len(answers) > before + 1 for answers, before in zip(seen, done, strict=True)):
            server(np.zeros(3, np.float32))
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        for answers, before in zip(seen, done, strict=True):
            assert all(len(one) == 1 for one in answers)  # all rows of a request by one version
            assert answers[0] == {1.0}
            assert answers[before + 1 :] == [{2.0}] * (len(answers) - before - 1)
            assert answers == sorted(answers, key=min)
        # Who kept the old handle is served by the new version; what it held is gone.
        assert np.array_equal(
            old.run_threaded([{"x": np.zeros(3, np.float32)}]).result(30.0)[0][0], [2, 2, 2]
        )
        assert old.load() == (0, 0)
        del batches[:]
        assert survivors([*programs, weights]) == []


def test_W7_a_map_goes_on_with_the_new_version_and_lets_the_old_one_go():
    kept = []
    with Server(version(1)) as server:
        weights = weakref.ref(server.model().servable.leaves[0])

        def items():
            for place in range(2000):
                if place == 300:
                    server.replace(version(2, apply=lambda w, *, x: w + x * 0))
                if place == 1999:
                    gc.collect()
                    kept.append(weights())
                yield {"x": np.zeros(1 + place % 8, np.float32)}

        answers = np.array([answer[0] for answer in server.map(items())])
    assert kept == [None]
    assert set(answers[:256]) == {1.0}
    assert set(answers[300:]) == {2.0}


def test_W7_a_version_of_the_same_shapes_takes_the_programs_over(compiles):
    batches = []
    with Server(version(1), on_batch=batches.append) as server:
        old = server.model()
        programs = {bucket: old.cache.get(bucket).executable for bucket in old.cache.ready()}
        seconds = {bucket: old.cost.seconds(bucket) for bucket in programs}
        del batches[:]
        later = version(2)
        with compiles.none():
            new = server.replace(later)
        assert batches == []
        assert {bucket: new.cache.get(bucket).executable for bucket in new.cache.ready()} == programs
        assert {warm.facts.source for warm in new.report.warm} == {"shared"}
        assert new.cost.seconds(old.order[0]) == pytest.approx(seconds[old.order[0]])
        assert server(np.zeros((2, 3), np.float32)).ravel().tolist() == [2.0] * 6


def test_models_of_one_network_share_their_programs(compiles):
    with Server(version(1, "a"), version(2, "b"), version(3, "c")) as server:
        assert compiles.count == 2  # one a bucket
        assert {server.model(name).report.warm[0].facts.source for name in "bc"} == {"shared"}
        for name, value in (("a", 1), ("b", 2), ("c", 3)):
            assert server(np.zeros(2, np.float32), model=name).tolist() == [value] * 2
    with Server(version(4, "d")) as server:
        assert server.model("d").report.warm[0].facts.source == "compiled"


def test_W7_requests_that_wait_are_answered_by_the_version_they_came_to(serve, doubling):
    server, device = serve(doubling(batch=1, length=8))
    old = server.model()
    device.hold()
    futures = [old.run_threaded([{"x": np.full(3, one, np.float32)}]) for one in range(3)]
    assert device.held.wait(30.0)
    told = []
    swap = threading.Thread(target=lambda: told.append(server.replace(doubling(batch=1, length=8))))
    swap.start()
    device.release()
    swap.join(60.0)
    assert not swap.is_alive()
    assert [float(future.result(30.0)[0][0][0]) for future in futures] == [0.0, 2.0, 4.0]
    assert told == [server.model()]
    assert told[0] is not old


def test_a_program_that_came_in_the_background_leaves_with_its_version(monkeypatch):
    with Server(version(1)) as server:
        old = server.model()
        late = Bucket(("batch", "length"), (2, 8))
        old.cache.request(late).result(20.0)
        server.replace(version(2))
        assert old.cache.ready() == ()
        dropped = []
        monkeypatch.setattr(server._dispatcher, "drop_waiting", lambda *args: dropped.append(args))
        old.keeper._failed(late, KeyError("too late"))
        assert not dropped  # in its lane the rows of another model may wait


def test_W7_a_version_that_cannot_be_made_leaves_the_old_one_in_place():
    def broken(w, *, x):
        raise RuntimeError("no such kernel")

    with Server(version(1)) as server:
        with pytest.raises(WarmupError, match="no such kernel"):
            server.replace(version(2, apply=broken))
        assert np.array_equal(server(np.zeros(2, np.float32)), [1, 1])
        with pytest.raises(ConfigError, match="rename it"):
            server.replace(version(2, name="other"))
        with pytest.raises(ConfigError, match="takes and returns the same"):
            server.replace(version(2, apply=lambda w, *, x: {"y": x + w}))
        server.replace(version(3))
        assert np.array_equal(server(np.zeros(2, np.float32)), [3, 3])


def test_C8_loading_and_unloading_a_model_many_times_keeps_nothing(survivors):
    alive, resident = [], {}
    with Server(version(0, batches=[4])) as server:
        for number in range(1, 21):
            server.replace(version(number, batches=[4]))
            alive.append(weakref.ref(server.model().servable.leaves[0]))
            if number in (5, 20):
                resident[number] = resident_bytes()
        assert survivors(alive[:-1]) == []
        assert alive[-1]() is not None
    assert resident[20] <= 1.05 * resident[5]


def test_W7_a_swap_whose_old_version_waits_ends_with_the_server(serve, doubling):
    server, _ = serve(doubling(batch=4, length=8), max_wait_s=10.0)
    old, told = server.model(), []
    waiting = old.run_threaded([{"x": np.zeros(3, np.float32)}])  # time stands still: it waits for a batch

    def swap():
        try:
            told.append(server.replace(doubling(batch=4, length=8)))
        except Closed as error:
            told.append(error)

    thread = threading.Thread(target=swap)
    thread.start()
    (device,) = server._device._each
    until_s = time.monotonic() + 30.0
    while not device._crew.retiring and time.monotonic() < until_s:
        thread.join(0.001)
    assert device._crew.retiring
    server.close(drain_s=0.0)
    thread.join(30.0)
    assert not thread.is_alive()
    assert len(told) == 1
    with pytest.raises(Closed):
        waiting.result(30.0)


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_W7_a_swap_ends_when_the_last_that_waits_for_the_old_version_gives_up(serve, doubling, end):
    clock = ManualClock()
    server, device = serve(doubling(batch=4, length=8), max_wait_s=100.0, clock=clock)
    old, told = server.model(), []
    rows = [{"x": np.zeros(3, np.float32)}]
    waiting = old.run_threaded(rows, timeout_s=60.0)  # for a batch that the clock never lets begin
    swap = threading.Thread(target=lambda: told.append(server.replace(doubling(batch=4, length=8))))
    swap.start()
    (loop,) = server._device._each
    until_s = time.monotonic() + 30.0
    while not (loop._crew.retiring and server._dispatcher._devices[0].sleeps):
        assert time.monotonic() < until_s
        swap.join(0.001)
    device.runs.clear()
    if end == "cancelled":
        waiting.cancel()
    else:
        clock.advance(61.0)
        assert isinstance(waiting.exception(30.0), DeadlineExceeded)
    swap.join(30.0)
    assert told == [server.model()]
    assert old.left
    assert device.runs == []  # nothing had to come by for it


def test_W7_a_swap_that_is_not_waited_for_has_been_made(serve, doubling):
    server, _ = serve(doubling(batch=4, length=8), max_wait_s=100.0)
    old = server.model()
    waiting = old.run_threaded([{"x": np.zeros(3, np.float32)}])
    with pytest.raises(
        TimeoutError, match="serves; '1' was to let go within 0 s of that and has 1 rows left"
    ):
        server.replace(doubling(batch=4, length=8, version="2"), timeout_s=0.0)
    assert server.model().version == "2"
    assert not old.left
    waiting.cancel()
    until_s = time.monotonic() + 30.0
    while old.cache.ready() or not old.left:  # in the compile thread
        assert time.monotonic() < until_s
        time.sleep(0)


def test_W7_a_server_that_was_given_many_versions_is_as_one_that_was_given_one():
    with Server(version(0)) as server:
        first = server.model()
        servables = [version(number) for number in range(1, 31)]
        models = [weakref.ref(server.replace(servable)) for servable in servables]
        assert first.latest is server.model()
        assert first.load() == (0, 0)
        assert np.array_equal(
            first.run_threaded([{"x": np.zeros(3, np.float32)}]).result(30.0)[0][0], [30] * 3
        )
        lanes = {server.model().lane, first.lane}
        assert len(lanes) <= 2
        del servables
        gc.collect()
        assert sum(one() is not None for one in models) <= 2


def test_W7_who_comes_while_the_old_version_leaves_is_answered_by_the_new_one(serve, doubling):
    server, _ = serve(doubling(batch=1, length=8))
    old = server.model()
    latest = server.replace(doubling(batch=1, length=8))
    old._successor = None  # as a caller saw it that asked just before
    old._door = latest._door
    offer = old._dispatcher.offer

    def late(*args):
        old._successor = latest
        return offer(*args)

    old._dispatcher.offer = late
    answer = old.run_threaded([{"x": np.full(3, 4, np.float32)}]).result(30.0)
    assert float(answer[0][0][0]) == 8.0
