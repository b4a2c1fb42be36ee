"""The program cache: one compile for each bucket, failures shared and not kept."""

import random
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import (
    CompileError,
    InputError,
    ProgramCache,
    SealedError,
    Servable,
    Staging,
    check_item,
    compile_program,
    seal_process,
    unseal_process,
    warm_up,
    warmup_order,
)

pytestmark = pytest.mark.usefixtures("strict_numerics")
WAIT_S = 30
AXES = ("batch", "length")


def bucket(*sizes):
    return Bucket(AXES, sizes)


class Model:
    """A servable with its cache; counts its compiles."""

    def __init__(self, service, apply=lambda p, x: x * p, params=2.0, **options):
        options = {"inputs": {"x": "float32[length]"}, "limits": {"length": 64, "batch": 4}} | options
        self.servable = Servable(apply, params, **options)
        self.leaves = [jax.device_put(leaf) for leaf in self.servable.leaves]
        self.compiled = []
        self.cache = ProgramCache(self._compile, service)

    def _compile(self, bucket):
        self.compiled.append(bucket)
        return compile_program(self.servable, bucket, self.leaves)

    def program(self, *sizes):
        return self.cache.request(Bucket(self.servable.grid.axes, sizes)).result(WAIT_S)


def asked_at_once(cache, one, count=8):
    """Futures of `count` threads that ask for one bucket at the same moment."""
    gate = threading.Barrier(count)
    futures = []

    def ask():
        gate.wait(WAIT_S)
        futures.append(cache.request(one))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(futures) == count
    return futures


def test_C7_eight_threads_share_one_compile(service, compiles):
    model = Model(service)
    model.program(1, 8)
    before = compiles.count
    futures = asked_at_once(model.cache, bucket(2, 16))
    programs = {future.result(WAIT_S) for future in futures}
    assert len(programs) == 1
    assert model.compiled.count(bucket(2, 16)) == 1
    assert compiles.count - before == 1


def test_C7_a_failure_reaches_all_and_is_not_kept(service):
    gate = threading.Event()
    attempts = []

    def build(one):
        attempts.append(one)
        if len(attempts) == 1:
            gate.wait(WAIT_S)
            raise CompileError("first time")
        return "program"

    cache = ProgramCache(build, service)
    futures = asked_at_once(cache, bucket(1, 8))
    gate.set()
    errors = {future.exception(WAIT_S) for future in futures}
    assert len(errors) == 1
    assert str(errors.pop()) == "first time"
    assert cache.ready() == ()
    assert cache.request(bucket(1, 8)).result(WAIT_S) == "program"
    assert cache.ready() == (bucket(1, 8),)
    assert len(attempts) == 2


def test_C7_who_asks_again_the_moment_a_failure_shows_gets_a_new_try():
    """A future wakes its waiters before its callbacks run: the failed one may still be registered."""

    again = []

    class Manual:
        def __init__(self):
            self.jobs = []

        def submit(self, job):
            future = Future()
            # Ahead of the cache's own callback, as a woken waiter may be.
            future.add_done_callback(lambda _: again.append(cache.request(bucket(1, 8))))
            self.jobs.append(future)
            return future

    manual = Manual()
    cache = ProgramCache(lambda one: None, manual)
    first = cache.request(bucket(1, 8))
    assert cache.request(bucket(1, 8)) is first
    first.set_exception(CompileError("no"))
    assert len(manual.jobs) == 2
    assert again[0] is not first
    assert cache.request(bucket(1, 8)) is again[0], "the late callback of the first must not drop the second"


def test_C6_warming_in_any_order_gives_the_same_programs(service, compiles):
    used = []
    for order in ([1, 2, 4, 8], [8, 4, 2, 1]):
        model = Model(service, limits={"length": 8, "batch": 8})
        for rows in order:
            model.program(rows, 8)
        with compiles.none():
            for _ in range(100):
                assert model.cache.get(bucket(4, 8)) is model.program(4, 8)
        used.append({rows: str(model.cache.get(bucket(rows, 8)).bucket) for rows in order})
        assert sorted(model.compiled) == [bucket(rows, 8) for rows in (1, 2, 4, 8)]
    assert used[0] == used[1]


PAIRS = {
    "dtype": ({"params": 2}, {"params": 2, "inputs": {"x": "int32[length]"}}),
    "bfloat16": ({"inputs": {"x": "float32[length]"}}, {"inputs": {"x": "bfloat16[length]"}}),
    "shape": ({"inputs": {"x": "float32[length, 2]"}}, {"inputs": {"x": "float32[length, 4]"}}),
    "flag": ({"apply": lambda p, x: x * p}, {"apply": lambda p, x: -x * p}),
    "version": ({"params": 2.0, "version": "1"}, {"params": 3.0, "version": "2"}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_C1_models_that_differ_have_their_own_programs(service, name):
    first, second = (Model(service, **options) for options in PAIRS[name])
    programs = [model.program(2, 8) for model in (first, second)]
    assert programs[0] is not programs[1]
    assert programs[0].executable is not programs[1].executable
    results = []
    for model, program in zip((first, second), programs, strict=True):
        one = model.servable.signature.inputs[0]
        shape = (2, 8, *one.dims[1:])
        results.append(np.asarray(program({"x": np.ones(shape, one.dtype)})[0], np.float32))
    sign = {"flag": -1.0, "version": 1.5}.get(name, 1.0)
    assert results[0].flat[0] * sign == results[1].flat[0]


def test_C1_buckets_are_told_apart_when_every_hash_is_equal(service, monkeypatch):
    monkeypatch.setattr(Bucket, "__hash__", lambda self: 7)
    model = Model(service, inputs={"x": "float32[length, 1]"}, limits={"length": 16, "batch": 16})
    for sizes in [(2, 8), (16, 8), (8, 16), (2, 16)]:
        program = model.program(*sizes)
        assert program.bucket.sizes == sizes
        assert program({"x": np.ones((*sizes, 1), np.float32)})[0].shape == (*sizes, 1)
    assert len(model.compiled) == 4


def test_C2_a_warm_grid_compiles_nothing_for_any_admissible_request(service, compiles):
    options = {"inputs": {"x": "float32[length]", "m": "mask[length]"}, "scheme": {"batch": [1, 2, 4, 8]}}
    model = Model(
        service,
        lambda p, x, m: jnp.where(m, x, 0.0).sum(1) * p,
        limits={"length": 256, "batch": 8},
        **options,
    )
    grid = model.servable.grid
    assert len(grid.buckets) == 4 * 6
    report = warm_up(model.cache, warmup_order(grid), lambda program: 0.0)
    report.require_complete()
    stagings = {one: Staging(model.servable.signature, one) for one in grid.buckets}
    draw = random.Random(0)
    numbers = np.arange(256, dtype=np.float32)
    seal_process()
    try:
        with compiles.none():
            for _ in range(10_000):
                rows, length = draw.randint(1, 8), draw.randint(1, 256)
                chosen = grid.smallest(rows, (length,))
                item = {"x": numbers[:length]}
                inputs = stagings[chosen].fill([item] * rows, [(length,)] * rows)
                (sums,) = model.cache.get(chosen)(inputs)
            assert np.asarray(sums)[0] == 2 * numbers[:length].sum()
            off_grid = bucket(8, 300)
            with pytest.raises(SealedError, match=r"8x300 is not warm \(no warm bucket has length=300\); "):
                model.cache.get(off_grid)
            with pytest.raises(InputError, match="axis 'length' is limited to 256; input 'x' has 300"):
                check_item(model.servable.signature, {"x": np.zeros(300)}, model.servable.limits)
            with pytest.raises(InputError, match=r"'x'.*float32\[8,256\].*float32\[8,300\]"):
                model.cache.get(bucket(8, 256))(
                    {"x": np.zeros((8, 300), np.float32), "m": np.zeros((8, 300), bool)}
                )
    finally:
        unseal_process()
    assert len(model.compiled) == 24


def test_B6_the_error_of_a_miss_names_axis_and_nearest_bucket(service):
    cache = ProgramCache(lambda one: one, service)
    with pytest.raises(SealedError, match="8x64 is not warm, nor is any other over batch, length: warm up"):
        cache.get(bucket(8, 64))
    for one in (bucket(1, 64), bucket(8, 128), bucket(8, 16)):
        cache.request(one).result(WAIT_S)
    with pytest.raises(SealedError, match="8x64 is not warm; the nearest warm one is 1x64: run in that"):
        cache.get(bucket(8, 64))
    with pytest.raises(SealedError, match=r"\(no warm bucket has batch=9\); the nearest warm one is 8x128"):
        cache.get(bucket(9, 128))
    with pytest.raises(SealedError, match="nor is any other over batch, width"):
        cache.get(Bucket(("batch", "width"), (8, 128)))


def test_a_bucket_that_fails_leaves_the_others(service):
    def build(one):
        if one["length"] == 16:
            raise CompileError("16 is bad")
        return one

    cache = ProgramCache(build, service)
    futures = [cache.request(bucket(1, length)) for length in (8, 16, 32)]
    assert [future.exception(WAIT_S) is None for future in futures] == [True, False, True]
    assert cache.ready() == (bucket(1, 8), bucket(1, 32))


def test_a_closed_service_refuses(service):
    cache = ProgramCache(lambda one: one, service)
    service.close()
    with pytest.raises(CompileError, match="after close"):
        cache.request(bucket(1, 8))
    with pytest.raises(CompileError, match="after close"):
        cache.request(bucket(1, 8))
