"""`servax inspect` and `servax check`, run as commands."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from servax.server.cli.inspect import check, inspect
from typer.testing import CliRunner

MODELS = """
import jax.numpy as jnp
import servax

def make(function, name):
    inputs = {"x": "float32[length, 4]", "mask": "mask[length]"}
    return servax.Servable(function, inputs=inputs, limits={"length": 16, "batch": 4}, name=name)

def mean():
    return make(lambda *, x, mask: x.mean(1), "mean")

total = make(lambda *, x, mask: jnp.where(mask[..., None], x, jnp.float32(0)).sum(1), "total")
words = servax.Servable(
    lambda *, ids, mask: jnp.where(mask, ids, 0).sum(1),
    inputs={"ids": "int32[length]", "mask": "mask[length]"},
    limits={"length": 16, "batch": 4},
)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "inspected_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(inspect)
    app.command()(check)
    yield lambda *words: CliRunner().invoke(app, list(words))
    sys.modules.pop("inspected_models", None)


def test_P13_check_refuses_an_axis_and_says_why_and_what_to_do(run: Any) -> None:
    result = run("check", "inspected_models:mean")
    assert result.exit_code == 4
    for part in ("length", "refused", "output 'output' at row 0", "moved by", "'length': 'exact'"):
        assert part in result.stdout


def test_check_passes_a_masked_model(run: Any) -> None:
    result = run("check", "inspected_models:total")
    assert result.exit_code == 0
    assert result.stdout.count("safe") == 2


def test_check_as_json(run: Any) -> None:
    result = run("check", "inspected_models:mean", "--json")
    assert result.exit_code == 4
    report = json.loads(result.stdout)
    assert report["refused"] == ["length"]
    assert report["exact_options"]["scheme"] == {"batch": [1], "length": "exact"}


def test_check_takes_a_vocabulary(run: Any) -> None:
    assert run("check", "inspected_models:words", "--ids-below", "ids=30522").exit_code == 0
    wrong = run("check", "inspected_models:words", "--ids-below", "ids")
    assert wrong.exit_code == 2
    assert "--ids-below is name=number" in wrong.stderr


def test_inspect_shows_kernels_and_speed(run: Any) -> None:
    result = run("inspect", "inspected_models:total", "--bucket", "4x16", "--bucket", "1x8")
    assert result.exit_code == 0
    for part in (
        "4x16",
        "1x8",
        "kernels a call",
        "of the machine's matrix peak",
        "fusions of 4x16",
        "select",
    ):
        assert part in result.stdout


def test_inspect_as_json_takes_the_covering_bucket(run: Any) -> None:
    result = run("inspect", "inspected_models:total", "--json")
    assert result.exit_code == 0
    (program,) = json.loads(result.stdout)["programs"]
    assert program["bucket"] == "1x16"
    assert program["kernels"] >= 1
    assert program["run_s"] > 0
    assert 0 <= program["share_of_peak"] < 1.5


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("inspect", "inspected_models:total", "--bucket", "4x16x2"), 2, "one size for each of the axes"),
        (("inspect", "inspected_models:total", "--bucket", "8x16"), 3, "too large on 'batch'"),
        (("inspect", "inspected_models:none"), 3, "'inspected_models:none' must exist"),
        (("check", "inspected_models:total", "--scheme", "single"), 3, "brings its own grid"),
    ],
)
def test_wrong_usage_is_one_line_and_a_code(run: Any, words: Any, code: int, message: str) -> None:
    result = run(*words)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
