"""Golden answers in the packed layout, many texts a row, and one by one."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import servax
from servax.bucketing import Grid
from servax.models.registry import load

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def test_P9_golden_texts_that_share_rows() -> None:
    texts = json.loads((GOLDEN / "minilm_texts.json").read_text())
    expected = np.load(GOLDEN / "minilm_embeddings.npy")
    model = load("minilm")
    padded = servax.Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits=model.limits,
        grid=Grid.parse("1x64 1x256 2x256", ("batch", "length")),
        name="minilm",
    )
    packed = servax.PackedServable(padded, partial(model.apply_packed, max_segments=16), max_segments=16)
    records = []
    items = [{"ids": np.array(one["input_ids"], np.int32)} for one in texts]
    with servax.Server(packed, on_batch=records.append) as server:
        together = server.map(items)
        alone = [server(ids=item["ids"]) for item in items[:5]]
    got = np.stack([answer["embedding"] for answer in together])
    assert np.abs(got - expected).max() <= 1e-5
    assert np.abs(np.stack([one["embedding"] for one in alone]) - expected[:5]).max() <= 1e-5
    assert max(record.rows for record in records) > 4
