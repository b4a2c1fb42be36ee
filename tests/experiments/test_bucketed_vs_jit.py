"""The comparison with jax.jit: few programs, the same answers, padding as computed."""

import json
from pathlib import Path

import pytest
from servax.experiments.bucketed_vs_jit import CONTENDERS, main
from servax.experiments.errors import ExperimentError


def test_few_programs_where_jit_compiles_one_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from servax.experiments import bucketed_vs_jit as script

    monkeypatch.setattr(script, "LAYERS", 1)
    monkeypatch.setattr(script, "WIDTH", 8)
    monkeypatch.setattr(script, "_REPEATS", 1)
    monkeypatch.setattr(
        script, "measure", lambda calls, seed: [script.child(n, calls, seed) for n in CONTENDERS]
    )
    main(json_file=tmp_path / "result.json", quick=True, calls=6, seed=0, child_name="")
    rows = {row["contender"]: row for row in json.loads((tmp_path / "result.json").read_text())["rows"]}
    exact, limit, powers, fitted = (rows[name] for name in CONTENDERS)
    assert exact["compiles"] == exact["lengths"] > powers["compiles"] > limit["compiles"] == 1
    assert exact["waste"] == 0
    assert fitted["waste"] < powers["waste"] < limit["waste"]
    assert [row["sum"] for row in rows.values()] == pytest.approx([exact["sum"]] * 4, rel=1e-4, abs=1e-4)


def test_other_answers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from servax.experiments import bucketed_vs_jit as script

    class Done:
        returncode, stderr = 0, ""

        def __init__(self) -> None:
            self.stdout = json.dumps({"sum": next(sums)})

    sums = iter([1.0, 1.0, 2.0, 1.0])
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(ExperimentError, match="must not change the answers"):
        script.measure(4, 0)
