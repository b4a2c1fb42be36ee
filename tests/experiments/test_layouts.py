"""The comparison of layouts: whether it works; the figures need a quiet machine."""

import json

from servax.experiments import layouts


def test_layouts_quick(tmp_path):
    layouts.main(tmp_path / "out.json", texts=12, rounds=1, quick=True, seed=0)
    found = json.loads((tmp_path / "out.json").read_text())
    names = {row["layout"] for row in found["rows"]}
    assert names == {"powers of two", "fitted", "fitted, switched", "packed"}
    assert all(row["texts_per_s"] > 0 and 0 <= row["waste"] < 1 for row in found["rows"])
    assert found["best_tokens_per_s"] > 0
