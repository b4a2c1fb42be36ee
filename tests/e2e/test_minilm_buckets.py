"""Golden answers in every bucket of the default grid, with neighbours and without."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import servax
from servax.jit_cache import Staging
from servax.models.registry import load

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="module")
def server() -> Iterator[servax.Server]:
    model = load("minilm")
    servable = servax.Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits={"batch": 32, **model.limits},
        scheme="powers_of_two:16",
        max_elements=4096,
        name="minilm",
    )
    with servax.Server(servable) as running:
        yield running


def test_golden_in_every_bucket(server: servax.Server) -> None:
    texts = json.loads((GOLDEN / "minilm_texts.json").read_text())
    expected = np.load(GOLDEN / "minilm_embeddings.npy")
    items = [np.array(one["input_ids"], np.int32) for one in texts]
    model = server.model("minilm")
    rng = np.random.default_rng(0)
    buckets = model.servable.grid.buckets
    assert len(model.cache.ready()) == len(buckets) > 20
    for bucket in buckets:
        fitting = [index for index, ids in enumerate(items) if len(ids) <= bucket["length"]]
        staging = Staging(model.servable.signature, bucket)
        program = model.cache.get(bucket)
        for rows in {1, bucket.rows, max(1, bucket.rows - 1)}:
            chosen = rng.choice(fitting, size=rows, replace=len(fitting) < rows)
            arrays = staging.fill([{"ids": items[i]} for i in chosen], [(len(items[i]),) for i in chosen])
            got = np.asarray(program(arrays)[0])[:rows]
            assert np.abs(got - expected[chosen]).max() <= 1e-5, bucket
            assert (got * expected[chosen]).sum(1).min() >= 0.99999, bucket
