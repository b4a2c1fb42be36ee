"""The claim of `servax.experiments.waiting`, on fewer requests."""

import json
from pathlib import Path

import pytest
import typer
from servax.experiments.waiting import Load, main, measure
from typer.testing import CliRunner


@pytest.mark.parametrize(
    "load", [Load(share=0.02), Load(share=0.3), Load(share=0.9), Load(clients=1), Load(clients=8)], ids=str
)
def test_an_adaptive_wait_costs_little_and_takes_turns_into_batches(load: Load) -> None:
    for row in measure([load], 600, [0, 1]):
        assert row["adaptive"] <= 1.02 * row["never"]
        if row["device"] == "flat" and load.clients > 1:
            assert row["adaptive"] < 0.67 * row["never"]
        if load.share == 0.02 or load.clients == 1:
            assert row["fixed 4 ms"] > 2 * row["adaptive"]


def test_the_command_writes_its_result(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    file = tmp_path / "waiting.json"
    done = CliRunner().invoke(app, ["--json", str(file), "--count", "100", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert {"flat", "between", "linear"} == {row["device"] for row in json.loads(file.read_text())["rows"]}
