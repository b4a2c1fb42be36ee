"""What programs are timed on: a batch that is full to its last place, since they may leave padding out."""

import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import Grid
from servax.jit_cache import Program, Servable
from servax.server import Server

GRID = Grid.parse("1x8,2x32", ("batch", "length"))


@pytest.fixture
def runs(monkeypatch):
    """Copies of the inputs of every run, by bucket."""
    found, call = {}, Program.__call__

    def recorded(self, inputs):
        copies = {name: np.array(value) for name, value in inputs.items()}
        found.setdefault(self.bucket, []).append(copies)
        return call(self, inputs)

    monkeypatch.setattr(Program, "__call__", recorded)
    return found


def test_no_place_is_padding_when_a_program_is_timed(runs):
    def apply(params, ids, kept, mask, count):
        return {"sum": jnp.sum(jnp.where(mask, ids * kept, 0), axis=1) + count}

    inputs = {"ids": "int32[length] = 3", "kept": "int32[length]", "mask": "mask[length]"}
    servable = Servable(apply, {}, inputs=inputs | {"count": "lengths[length]"}, grid=GRID)
    with Server(servable):
        pass
    assert set(runs) == set(GRID.buckets)
    for bucket, found in runs.items():
        for one in found:
            assert one["mask"].all()
            assert (one["count"] == bucket.item_sizes[0]).all()
            assert (one["kept"] == 1).all(), "which may be a mask"
            assert (one["ids"] == 3).all(), "what stands on padding is known to do no harm"


def test_packed_rows_are_full_when_a_program_is_timed(runs, packed_sums):
    with Server(packed_sums(GRID)):
        pass
    timed = [one for found in runs.values() for one in found if not one["x"].any()]
    assert {one["segment_ids"].shape for one in timed} == {(1, 8), (2, 32)}
    assert all((one["segment_ids"] == 1).all() for one in timed)
