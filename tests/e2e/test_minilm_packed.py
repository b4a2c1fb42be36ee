"""MiniLM packed: several texts in one row, block-diagonal attention, the golden answers all the same."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from servax.bucketing import pack
from servax.models import load
from servax.models.registry import TextModel

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CAPACITY = 256


def test_P9_golden_texts_packed() -> None:
    model = load("minilm")
    assert isinstance(model, TextModel)
    texts = json.loads((GOLDEN / "minilm_texts.json").read_text())
    expected = np.load(GOLDEN / "minilm_embeddings.npy")
    items = [np.array(one["input_ids"], np.int32) for one in texts]
    packing = pack([len(item) for item in items], CAPACITY)
    ids, segments, positions = (np.zeros((packing.rows, CAPACITY), np.int32) for _ in range(3))
    packing.fill(ids, items, 0)
    packing.fill_segments(segments)
    packing.fill_positions(positions)
    most = int(segments.max())
    run = jax.jit(functools.partial(model.apply_packed, max_segments=most))
    out = np.asarray(run(model.params, ids=ids, segment_ids=segments, positions=positions)["embedding"])
    got = packing.gather_pooled(out)
    assert np.abs(np.stack(got) - expected).max() <= 1e-5
    # What packing is for: next to no padding.
    assert packing.rows <= -(-sum(map(len, items)) // CAPACITY) + 1
