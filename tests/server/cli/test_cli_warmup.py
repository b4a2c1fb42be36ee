"""`servax warmup` with budgets, recorded requests, a memory budget and the check of padding."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from servax.server.cli.app import app
from typer.testing import CliRunner

SERVABLES = """
import jax.numpy as jnp
import servax

def make(apply, name):
    return servax.Servable(
        apply, jnp.ones((8,), jnp.float32), inputs={"x": "float32[length]"},
        limits={"length": 64, "batch": 1}, scheme="powers_of_two:8", name=name,
    )

tiny = make(lambda w, *, x: x * w[0], "tiny")
mean = make(lambda w, *, x: x.mean(1) * w[0], "mean")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "warmed_models.py").write_text(SERVABLES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield lambda *words: CliRunner().invoke(app, ["warmup", *words])
    sys.modules.pop("warmed_models", None)


def told(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_W5_what_a_budget_leaves_is_listed_and_resumes(run: Any, tmp_path: Path) -> None:
    words = ("warmed_models:tiny", "--store", str(tmp_path / "store"), "--no-check-padding", "--json")
    first = run(*words, "--budget-bytes", "1")
    assert first.exit_code == 0, first.output
    assert [row["bucket"] for row in told(first)["programs"]] == ["1x64"]
    assert told(first)["left"] == ["tiny 1x8", "tiny 1x16", "tiny 1x32"]
    second = run(*words)
    assert [row["source"] for row in told(second)["programs"]] == [
        "store",
        "compiled",
        "compiled",
        "compiled",
    ]
    assert told(second)["left"] == []


def test_W5_a_budget_of_seconds_warms_the_covering_bucket_at_least(run: Any) -> None:
    result = run(
        "warmed_models:tiny", "--no-store", "--no-check-padding", "--budget-seconds", "0.001", "--json"
    )
    assert result.exit_code == 0, result.output
    done = [row["bucket"] for row in told(result)["programs"]]
    assert done[0] == "1x64"
    assert len(done) + len(told(result)["left"]) == 4


def test_W8_recorded_requests_are_warmed_first(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"length": 30, "count": 50}\n{"length": 12, "count": 3}\n')
    result = run("warmed_models:tiny", "--no-store", "--no-check-padding", "--replay", str(path), "--json")
    assert [row["bucket"] for row in told(result)["programs"]] == ["1x64", "1x32", "1x16", "1x8"]


def test_W8_a_missing_file_fails_and_a_bad_line_is_told(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = run("warmed_models:tiny", "--no-store", "--replay", str(tmp_path / "none.jsonl"))
    assert missing.exit_code == 3
    assert "recorded requests" in missing.output
    path = tmp_path / "requests.jsonl"
    path.write_text('{"length": 30}\n{"length": "many"}\n')
    assert run("warmed_models:tiny", "--no-store", "--replay", str(path)).exit_code == 0
    assert "line 2 of" in caplog.text
    assert "'many'" in caplog.text


def test_W6_a_memory_budget_is_planned_aloud(run: Any) -> None:
    fits = run("warmed_models:tiny", "--no-store", "--no-check-padding", "--memory-budget", "auto", "--json")
    assert fits.exit_code == 0, fits.output
    assert "4 buckets need" in fits.stderr
    refused = run("warmed_models:tiny", "--no-store", "--no-check-padding", "--memory-budget", "1000")
    assert refused.exit_code == 4
    assert "more than there is" in refused.output
    assert run("warmed_models:tiny", "--memory-budget", "plenty").exit_code == 2


def test_P13_a_users_model_is_checked_unless_told_not_to(run: Any) -> None:
    checked = run("warmed_models:mean", "--no-store")
    assert checked.exit_code == 4
    assert "length" in checked.output
    assert run("warmed_models:mean", "--no-store", "--no-check-padding").exit_code == 0
    assert run("warmed_models:tiny", "--no-store").exit_code == 0
