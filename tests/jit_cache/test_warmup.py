"""Warm-up: covering bucket first, a failing bucket isolated, everything said in the report."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket, Grid
from servax.jit_cache import (
    CompileError,
    ProgramCache,
    WarmupError,
    WarmupReport,
    warm_up,
    warmup_order,
)
from servax.jit_cache.program import Program, ProgramFacts
from servax.jit_cache.warmup import alike_failures

AXES = ("batch", "length")
GRID = Grid.parse("1x8,4x8,1x64,4x64,2x32", AXES)
FACTS = ProgramFacts(0.5, 1.0, 1.0, 1, 1, 1, 1)
WAIT_S = 30


def fake(bucket):
    return Program(bucket, None, [], FACTS)


def names(buckets):
    return [str(bucket) for bucket in buckets]


def test_the_covering_bucket_comes_first_then_small_before_large():
    assert names(warmup_order(GRID)) == ["1x64", "1x8", "4x8", "2x32", "4x64"]


sizes = st.tuples(st.integers(1, 8), st.integers(1, 64))


@given(st.lists(sizes, min_size=1, max_size=12))
def test_the_order_holds_each_bucket_once_and_starts_with_one_that_covers(drawn):
    limits = tuple(max(one[axis] for one in drawn) for axis in (0, 1))
    grid = Grid.explicit(AXES, [*drawn, (1, limits[1])])
    order = warmup_order(grid)
    assert sorted(order) == list(grid.buckets)
    assert order[0].holds(1, (limits[1],))
    assert [one.elements for one in order[1:]] == sorted(one.elements for one in order[1:])


def test_everything_is_warmed_and_run_once(service):
    steps, probed = [], []

    def probe(program):
        probed.append(program.bucket)
        return 0.25

    order = warmup_order(GRID)
    report = warm_up(ProgramCache(fake, service), order, probe, on_step=steps.append)
    assert report.complete
    report.require_complete()
    assert probed == order
    assert [one.bucket for one in report.warm] == order
    assert all((one.facts, one.run_s) == (FACTS, 0.25) for one in report.warm)
    assert [(step.bucket, step.done, step.total, step.error) for step in steps] == [
        (bucket, number, 5, None) for number, bucket in enumerate(order, start=1)
    ]
    assert report.elapsed_s >= steps[-1].elapsed_s >= steps[0].elapsed_s >= 0


def test_W2_a_failing_bucket_is_isolated_and_named(service):
    def build(bucket):
        if bucket["length"] == 32:
            raise CompileError("bucket 2x32 failed with ValueError: odd")
        return fake(bucket)

    steps = []
    report = warm_up(ProgramCache(build, service), warmup_order(GRID), lambda _: 0.0, on_step=steps.append)
    assert len(report.warm) == 4
    assert report.failed == {Bucket(AXES, (2, 32)): "bucket 2x32 failed with ValueError: odd"}
    assert [step.error is None for step in steps] == [True, True, True, False, True]
    assert not report.complete
    with pytest.raises(WarmupError, match="4 of 5 are: 2x32: bucket 2x32 failed with ValueError: odd"):
        report.require_complete()


def test_a_fault_of_the_model_is_not_told_for_every_bucket(service):
    def build(bucket):
        raise CompileError("no attribute 'foo'")

    report = warm_up(ProgramCache(build, service), warmup_order(GRID), lambda _: 0.0)
    assert len(report.failed) == 5
    with pytest.raises(WarmupError, match=r"0 of 5 are: 5 buckets: no attribute 'foo'$"):
        report.require_complete()


def test_failures_that_name_their_bucket_are_alike_too(service):
    def build(bucket):
        if bucket.sizes[0] == 1:
            raise CompileError(f"bucket {bucket} failed with 'foo'")
        raise CompileError(f"{bucket.sizes} is none of mine")

    report = warm_up(ProgramCache(build, service), warmup_order(GRID), lambda _: 0.0)
    first, *others = alike_failures(report.failed)
    assert first == ("2 buckets", "bucket 1x64 failed with 'foo'", 2)
    assert [count for _, _, count in others] == [1, 1, 1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TimeoutError("slow"), ValueError()])
def test_a_failing_first_run_is_not_called_a_failing_compile(service, error):
    def probe(program):
        if program.bucket.rows == 4:
            raise error
        return 0.0

    report = warm_up(ProgramCache(fake, service), warmup_order(GRID), probe)
    assert len(report.warm) == 3
    text = str(error) or "ValueError"
    assert set(report.failed.values()) == {f"compiled, but its first run failed: {text}"}


def test_a_compile_that_takes_too_long_is_named(service):
    gate = threading.Event()

    def build(bucket):
        if bucket == GRID.buckets[0]:
            gate.wait(WAIT_S)
        return fake(bucket)

    report = warm_up(ProgramCache(build, service), GRID.buckets[:1], lambda _: 0.0, compile_timeout_s=0.01)
    gate.set()
    assert list(report.failed.values()) == ["not compiled within 0.01 s"]


def test_a_timeout_inside_the_compiler_keeps_its_own_message(service):
    def build(bucket):
        raise TimeoutError("remote store did not answer")

    report = warm_up(ProgramCache(build, service), GRID.buckets[:1], lambda _: 0.0)
    assert list(report.failed.values()) == ["remote store did not answer"]


def test_a_stop_ends_it_between_two_buckets_and_leaves_the_rest_alone(service):
    stop, built = threading.Event(), []

    def build(bucket):
        built.append(bucket)
        return fake(bucket)

    grid = Grid.explicit(AXES, [(rows, 8) for rows in range(1, 21)])
    report = warm_up(
        ProgramCache(build, service), warmup_order(grid), lambda _: 0.0, stop=stop,
        on_step=lambda step: stop.set() if step.done == 2 else None,
    )  # fmt: skip
    assert report.stopped
    assert len(report.warm) == 2
    assert not report.complete
    service.submit(lambda: None).result(WAIT_S)
    assert len(built) <= 6, "buckets are asked for a few at a time"
    with pytest.raises(WarmupError, match=r"2 of 20 are \(stopped\): none failed"):
        report.require_complete()


def test_a_stop_before_the_first_bucket(service):
    stop = threading.Event()
    stop.set()
    report = warm_up(ProgramCache(fake, service), GRID.buckets, lambda _: 0.0, stop=stop)
    assert report.stopped
    assert report.warm == []


def test_closing_the_compile_service_stops_it(service):
    def probe(program):
        service.close()
        return 0.0

    report = warm_up(ProgramCache(fake, service), warmup_order(GRID), probe)
    assert report.stopped
    assert 1 <= len(report.warm) < 5
    assert report.failed == {}


def test_nothing_compiles_while_a_program_is_timed(service):
    """A probe beside a compile measures the compile: several times too long, and then never corrected."""
    order = warmup_order(GRID)
    building = threading.Event()
    begun, seen = [], []

    def build(bucket):
        building.set()
        begun.append(bucket)
        built = fake(bucket)
        building.clear()
        return built

    def probe(program):
        # The service is one thread, so a job behind this one would show that something was queued ahead.
        service.submit(lambda: None).result(30)
        seen.append((program.bucket, building.is_set(), list(begun)))
        return 0.0

    assert warm_up(ProgramCache(build, service), order, probe).complete
    assert seen == [(bucket, False, order[: place + 1]) for place, bucket in enumerate(order)]


def test_a_report_can_be_watched_while_it_grows(service):
    report = WarmupReport(5)
    seen = []
    warm_up(
        ProgramCache(fake, service), warmup_order(GRID), lambda _: 0.0,
        report=report, on_step=lambda _: seen.append(len(report.warm)),
    )  # fmt: skip
    assert seen == [1, 2, 3, 4, 5]


def test_what_is_warm_already_is_not_built_again(service):
    built = []

    def build(bucket):
        built.append(bucket)
        return fake(bucket)

    cache = ProgramCache(build, service)
    for _ in range(2):
        assert warm_up(cache, warmup_order(GRID), lambda _: 0.0).complete
    assert len(built) == 5


def test_an_error_of_the_progress_callback_is_not_lost(service):
    def on_step(step):
        raise OSError("terminal went away")

    with pytest.raises(OSError, match="terminal went away"):
        warm_up(ProgramCache(fake, service), GRID.buckets, lambda _: 0.0, on_step=on_step)
