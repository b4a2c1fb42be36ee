"""The command line without a model: version, usage errors, exit codes."""

import subprocess
import sys

import pytest
import servax
from pydantic import ValidationError
from servax.server import cli
from servax.server.cli.wiring import import_attribute, resolve
from servax.server.config import ServeConfig
from servax.server.errors import ConfigError
from typer.testing import CliRunner

runner = CliRunner()


def test_version_and_help() -> None:
    assert runner.invoke(cli.app, ["--version"]).output.strip() == f"servax {servax.__version__}"
    assert "warmup" in runner.invoke(cli.app, ["--help"]).output


def test_the_module_runs_as_a_script() -> None:
    command = [sys.executable, "-m", "servax.server.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"servax {servax.__version__}"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "70000"],
        ["serve", "--max-batch", "0"],
        ["serve", "--no-such-option"],
        ["serve", "--log-level", "loud"],
        ["serve", "--max-wait-ms", "-1"],
        ["fly"],
        ["warmup", "--max-length", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["serve", "warmup"])
def test_several_models_are_told_where_they_are_given(command: str) -> None:
    result = runner.invoke(cli.app, [command, "minilm", "smollm2", "--max-batch", "4"])
    assert result.exit_code == 2
    said = result.output.replace("\n", " ")
    assert "takes one model, got 'minilm', 'smollm2'; several are given in a TOML file" in said
    assert '[[models]], below it model = "minilm"' in said
    assert "--config" in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no_such_module_x:model", "importable"),
        ("json:no_such_name", "no_such_name"),
        ("json:dumps.__name__", "Servable"),
        ("./no/such/folder", "must load"),
    ],
)
def test_a_model_that_is_not_there_exits_with_3(model: str, words: str) -> None:
    result = runner.invoke(cli.app, ["warmup", model])
    assert result.exit_code == 3, result.output
    assert words in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_traceback_shows_where() -> None:
    result = runner.invoke(cli.app, ["warmup", "no_such_module_x:model", "--traceback"])
    assert isinstance(result.exception, ConfigError)


def test_options_that_a_servable_fixes_are_refused() -> None:
    servax_option = ServeConfig(model="tests_no_module:x", max_batch=4)
    with pytest.raises(ConfigError, match="importable"):
        resolve(servax_option)
    with pytest.raises(ValidationError, match="extra"):
        ServeConfig(maxbatch=4)  # type: ignore[call-arg]


def test_import_attribute_follows_dots() -> None:
    assert import_attribute("os:path.join") is __import__("os").path.join
