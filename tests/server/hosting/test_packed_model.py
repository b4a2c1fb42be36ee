"""A model in the packed layout, served."""

import asyncio
import threading

import jax.numpy as jnp
import numpy as np
from servax.bucketing import Grid
from servax.server import Server
from servax.server.batching.request import Row

GRID = Grid.parse("1x8,1x32,2x32", ("batch", "length"))


def ask_all(server, lengths):
    rows = [{"x": np.arange(1, length + 1, dtype=np.float32)} for length in lengths]
    answers = asyncio.run(server.models["model"].submit(rows))
    for row, answer in zip(rows, answers, strict=True):
        assert answer["sum"] == 2 * row["x"].sum()
        np.testing.assert_array_equal(answer["each"], row["x"])


def test_P9_requests_of_many_callers_share_rows(packed_sums):
    batches = []
    with Server(packed_sums(GRID), on_batch=batches.append, max_wait_s=0.2) as server:
        threads = [
            threading.Thread(target=ask_all, args=(server, [1 + (seed * 7 + row) % 32 for row in range(20)]))
            for seed in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert sum(record.rows for record in batches) == 60
    assert max(record.rows for record in batches) > 2  # more items than a bucket has rows
    assert all(record.real <= record.computed for record in batches)


def test_items_that_no_bucket_holds_any_more_stay_in_theirs(ask, packed_sums):
    """A bucket may give way to others between the choice and a second try, in the device thread."""
    with Server(packed_sums(GRID)) as server:
        request = ask(*[1] * (2 * packed_sums.segments + 1))
        rows = [Row(request, index) for index in range(len(request.items))]
        assert server.model().smallest(GRID.buckets[0], rows) is GRID.buckets[0]
        assert server.model().smallest(GRID.buckets[0], rows[:-1]).rows == 2


def test_one_short_item_takes_a_small_bucket(packed_sums):
    batches = []
    with Server(packed_sums(GRID), on_batch=batches.append) as server:
        ask_all(server, [5])
    assert [str(record.bucket) for record in batches] == ["1x8"]


def test_a_row_that_gives_nan_fails_alone(packed_sums):
    from servax.server.hosting.programs import Programs

    def poisoned(params, *, x, segment_ids, positions):
        found = packed_sums.packed(params, x=x, segment_ids=segment_ids, positions=positions)
        return {**found, "sum": jnp.where(found["sum"] == 6.0, jnp.nan, found["sum"])}

    options = Programs(check_outputs=True)
    with Server(packed_sums(GRID, poisoned), programs=options) as server:

        async def both():
            model = server.models["model"]
            bad = [{"x": np.array([1, 2], np.float32)}]
            good = [{"x": np.array([1, 2, 3], np.float32)}]
            return await asyncio.gather(model.submit(bad), model.submit(good), return_exceptions=True)

        bad, good = asyncio.run(both())
    assert "NaN" in str(bad)
    assert good[0]["sum"] == 12.0


def test_explain_counts_items_not_rows(packed_sums):
    from servax.server.explain import explain_model

    with Server(packed_sums(GRID)) as server:
        found = explain_model(server.models["model"], 12, {"length": 5})
    assert sum(run["rows"] for run in found["runs"]) == 12
    most = {one["bucket"]: one["rows"] for one in found["candidates"]}
    assert most == {"1x8": 1, "1x32": 6, "2x32": 12}
