"""How commands end: help that says so, one line for an error, a traceback only for who asks, completion."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from servax.jit_cache import CompileError, StoreError
from servax.server.cli import app, exits, main
from servax.server.cli.exits import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    UsageError,
    exit_code,
)
from servax.server.errors import ConfigError, Overloaded
from servax.server.settings import read_settings
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ["serve", "warmup", "fit", "check", "inspect", "top", "doctor", "store"]
run = CliRunner()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), EXIT_USAGE),
        (ConfigError("x"), EXIT_CONFIG),
        (StoreError("x"), EXIT_CONFIG),
        (PermissionError("x"), EXIT_CONFIG),
        (CompileError("x"), EXIT_FAILED),
        (Overloaded("x"), EXIT_FAILED),
        (ZeroDivisionError("x"), EXIT_UNEXPECTED),
    ],
)
def test_the_exit_code_tells_what_went_wrong(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def broken_pipe() -> int:
    reads, writes = os.pipe()
    os.close(reads)
    return writes


@pytest.mark.parametrize("open_gone", [broken_pipe, lambda: os.open("/dev/full", os.O_WRONLY)])
def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch, open_gone: Any) -> None:
    with open(open_gone(), "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        exits.say("draining")
        exits.say("again")
        monkeypatch.undo()


def test_codes_are_documented_in_help_and_on_the_page() -> None:
    told = " ".join(run.invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert exits.HELP in told
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in (0, EXIT_UNEXPECTED, EXIT_USAGE, EXIT_CONFIG, EXIT_FAILED, exits.EXIT_INTERRUPTED, 143):
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE), code
    for command in COMMANDS:
        assert f"servax {command}" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_shows_its_defaults(command: str) -> None:
    result = run.invoke(app, [command, "-h"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    if command not in ("store", "doctor"):
        assert "default:" in result.output


def test_help_lists_options_under_headings() -> None:
    text = run.invoke(app, ["serve", "--help"], env={"COLUMNS": "160"}).output
    headings = [
        "Model",
        "Address, security and logs",
        "Queue, batching and deadlines",
        "Programs and their store",
    ]
    places = [text.index(f"─ {one} ─") for one in headings]
    assert places == sorted(places)


def every_command() -> list[list[str]]:
    found: list[list[str]] = [[]]
    for words in found:
        command: Any = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]
        found += [[*words, word] for word in getattr(command, "commands", ())]
    return found


def test_help_names_everything_in_full_on_80_columns() -> None:
    commands = every_command()
    assert ["store", "gc"] in commands
    for words in commands:
        command: Any = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]
        text = run.invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
        assert max(map(len, text.splitlines())) <= 80
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        names = [name for one in shown for name in (*one.opts, *one.secondary_opts)]
        cut = [name for name in names if name.startswith("--") and f"{name} " not in text]
        assert not cut, words
        assert "…" not in text, words


def test_an_unexpected_error_is_one_line_and_where_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("servax.server.cli.fit.read_sizes", broken)
    result = run.invoke(app, ["fit", "x.csv"])
    assert result.exit_code == EXIT_UNEXPECTED
    line = "error: ZeroDivisionError: by nothing (servax --debug shows where)"
    assert result.output.strip() == line
    assert isinstance(run.invoke(app, ["--debug", "fit", "x.csv"]).exception, ZeroDivisionError)
    shown = run.invoke(app, ["fit", "x.csv"], env={"SERVAX_DEBUG": "1"})
    assert isinstance(shown.exception, ZeroDivisionError)
    assert run.invoke(app, ["fit", "x.csv"]).output.strip() == line, "it does not stay on"


def test_a_bug_outside_of_a_commands_work_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by nothing")

    # The package has an object of that name too.
    monkeypatch.setattr(importlib.import_module("servax.server.cli.app"), "app", broken)
    exits.DEBUG.set(False)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == EXIT_UNEXPECTED
    assert "ZeroDivisionError: by nothing" in capsys.readouterr().err


def test_variables_of_the_command_line_are_no_options_of_the_server() -> None:
    read_settings({}, {"SERVAX_DEBUG": "1", "SERVAX_URL": "http://x"})
    with pytest.raises(ConfigError):
        read_settings({}, {"SERVAX_DEBUGG": "1"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "./no/such/folder"],
        ["check", "json:dumps"],
        ["store", "ls", "--store", __file__],
        ["store", "explain", "zz", "zz"],
        ["store", "ls", "--store", "nosuchscheme://bucket"],
    ],
)
def test_what_cannot_be_used_exits_with_3(arguments: list[str]) -> None:
    result = run.invoke(app, arguments)
    assert result.exit_code == EXIT_CONFIG, result.output
    assert "error: " in result.output
    assert "Traceback" not in result.output


def test_an_empty_store_is_said_to_be_empty(tmp_path: Path) -> None:
    result = run.invoke(app, ["store", "verify", "--store", str(tmp_path / "none")])
    assert (result.exit_code, "no programs in" in result.output) == (0, True)


def test_shells_can_complete_commands_and_options() -> None:
    code = "import sys; sys.argv[0] = 'servax'; from servax.server.cli import main; main()"

    def completed(line: str) -> str:
        words = {"_SERVAX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **words},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout

    assert {"doctor", "top", "serve"} <= set(completed("servax ").split())
    assert "--once" in completed("servax top --o")
