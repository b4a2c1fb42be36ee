"""Variants of a bucket's program: made, timed, the fastest kept, remembered."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Bucket, Grid
from servax.jit_cache import Servable, SignatureError, StoredPrograms
from servax.jit_cache.store import Store
from servax.jit_cache.tune import SWITCHED, Tuner
from servax.server import Server

AXES = ("batch", "length")
GRID = Grid.parse("1x4,4x4,1x16,2x16", AXES)
ONE = Bucket(AXES, (1, 4))


def total(params, *, x, mask):
    return {"sum": jnp.sum(jnp.where(mask, x, 0.0), axis=1) * params}


def laborious(params, *, x, mask):
    work = jax.lax.fori_loop(0, 30_000, lambda _, y: jnp.cos(y), jnp.where(mask, x, 0.0))
    return {"sum": total(params, x=x, mask=mask)["sum"] + 0.0 * jnp.sum(work, axis=1)}


def servable(apply=total, **options):
    return Servable(
        apply,
        np.float32(2),
        inputs={"x": "float32[length]", "mask": "mask[length]"},
        grid=GRID,
        **options,
    )


def ask(server, lengths):
    rows = [{"x": np.arange(length, dtype=np.float32)} for length in lengths]
    answers = asyncio.run(server.models["model"].submit(rows))
    for length, answer in zip(lengths, answers, strict=True):
        assert answer["sum"] == length * (length - 1)


def test_the_fastest_wins_and_a_tie_changes_nothing():
    tuner = Tuner(("a", "b", "c"))
    assert tuner.best(ONE) == "a"
    assert tuner.missing(ONE) == ["a", "b", "c"]
    tuner.record(ONE, "a", 1.0)
    tuner.record(ONE, "b", 0.98)
    assert tuner.best(ONE) == "a"
    tuner.record(ONE, "c", 0.5)
    assert tuner.best(ONE) == "c"
    assert tuner.missing(ONE) == []


def test_what_only_a_later_variant_is_known_of_is_taken():
    tuner = Tuner(("a", "b"))
    tuner.record(ONE, "b", 3.0)
    assert tuner.best(ONE) == "b"


@pytest.mark.parametrize("sizes", ["switched", "tuned"])
def test_answers_do_not_depend_on_how_a_bucket_became_a_program(sizes):
    with Server(servable(sizes=sizes)) as server:
        ask(server, [1, 4, 16, 3, 7, 2, 9, 16, 1, 1, 1, 1, 1])


def test_many_callers_share_calls_of_a_switched_program():
    batches = []
    with Server(servable(sizes="switched"), on_batch=batches.append) as server:
        threads = [
            threading.Thread(target=ask, args=(server, [1 + (seed * 7 + row) % 16 for row in range(40)]))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert sum(record.rows for record in batches) == 160
    assert all(record.seconds >= 0 and record.rows <= record.bucket.rows for record in batches)


def test_a_slow_function_gives_way_to_a_fast_variant_and_the_store_remembers(tmp_path):
    def make():
        return servable(laborious, variants={"short": total})

    def run():
        programs = StoredPrograms(Store.open(tmp_path / "store", home=tmp_path / "home", trial=None))
        with Server(make(), compile_program=programs) as server:
            model = server.models["model"]
            ask(server, [3, 16, 5])
            programs.save()
            found = {bucket: model.cache.get(bucket).variant for bucket in GRID}
            return found, programs.store.report()

    variants, report = run()
    assert set(variants.values()) == {"short"}
    assert report.compiled == 2 * len(GRID)
    variants, report = run()
    assert set(variants.values()) == {"short"}
    assert (report.compiled, report.loaded) == (0, len(GRID))


def test_a_variant_that_cannot_run_leaves_the_first_in_place(caplog):
    def broken(params, *, x, mask):
        return {"sum": jnp.zeros(x.shape[0] + 1)}  # of another size than the rows in every bucket

    with Server(servable(variants={"broken": broken})) as server:
        ask(server, [3, 4])
    assert "variant 'broken'" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": "elastic"}, "static"),
        ({"variants": {SWITCHED: total}}, "names of their own"),
        ({"variants": {"other": lambda params, *, y: y}}, "declared inputs"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options, words):
    with pytest.raises(SignatureError, match=words):
        servable(**options)


def test_an_unknown_variant_is_named():
    with pytest.raises(SignatureError, match="'nobody'"):
        servable(variants={"other": total}).as_variant("nobody")
