"""Options from a file, the environment and flags: who wins, what is refused, and what is told of it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.server import cli
from servax.server.config import ServeConfig
from servax.server.errors import ConfigError
from servax.server.settings import option_paths, read_settings
from typer.testing import CliRunner


def read(tmp_path: Path, text: str = "", flags: Any = None, env: Any = None) -> Any:
    file = tmp_path / "servax.toml"
    file.write_text(text)
    return read_settings(flags or {}, env, str(file))


def test_Q9_a_window_set_in_each_way_takes_effect(tmp_path: Path) -> None:
    by_file = read(tmp_path, "max_wait_ms = 100")
    by_env = read_settings({}, {"SERVAX_MAX_WAIT_MS": "100"})
    by_flag = read_settings({"max_wait_ms": 100.0})
    for settings, source in ((by_file, "file"), (by_env, "env"), (by_flag, "flag")):
        assert settings.config.max_wait_ms == 100.0
        assert settings.listed()["max_wait_ms"] == {"value": 100.0, "source": source}
    assert read_settings({}).listed()["max_wait_ms"] == {"value": 0.0, "source": "default"}


def test_the_later_source_wins(tmp_path: Path) -> None:
    text = "port = 1\ndrain_s = 1\nhost = 'a'\n[queue]\nrows = 2100\nelements = 7"
    env = {"SERVAX_DRAIN_S": "2", "SERVAX_HOST": "b", "SERVAX_QUEUE__ROWS": "2200", "PATH": "x"}
    settings = read(tmp_path, text, {"host": "c", "seal": None}, env)
    assert (settings.config.port, settings.config.drain_s, settings.config.host) == (1, 2.0, "c")
    assert (settings.config.queue.rows, settings.config.queue.elements) == (2200, 7)
    assert settings.sources == {
        "port": "file",
        "drain_s": "env",
        "host": "flag",
        "queue.rows": "env",
        "queue.elements": "file",
    }


def test_a_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "servax.toml"
    file.write_text("port = 4")
    assert read_settings({}, {"SERVAX_CONFIG": str(file)}).config.port == 4


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("max_wait = 1", "meant max_wait_ms"),
        ("[queue]\nrow = 1", "meant queue.rows"),
        ("[qeue]\nrows = 1", "meant queue.rows"),
        ("[[models]]\nmodel = 'minilm'\nmaxbatch = 4", "meant max_batch"),
        ("portt = 1", "meant port"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        read(tmp_path, text)


def test_an_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="meant SERVAX_MAX_BATCH"):
        read_settings({}, {"SERVAX_MAXBATCH": "4"})


def test_links_that_kubernetes_sets_are_no_options() -> None:
    links = {
        "SERVAX_SERVICE_HOST": "10.0.0.1",
        "SERVAX_SERVICE_PORT_HTTP": "8000",
        "SERVAX_PORT": "tcp://10.0.0.1:8000",
        "SERVAX_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read_settings({}, links).sources == {}


@pytest.mark.parametrize(
    ("text", "env", "words"),
    [
        ("port = 70000", {}, ["port", "70000", "servax.toml"]),
        ("port = 'x'", {}, ["port", "'x'"]),
        ("", {"SERVAX_QUEUE__ROWS": "0"}, ["queue.rows", "the environment"]),
        ("tls_cert = 'a'", {}, ["tls_key"]),
        ("max_request_rows = 5000", {}, ["queue.rows", "5000"]),
        ("max_batch = 4\n[[models]]\nmodel = 'minilm'", {}, ["max_batch", "[[models]]"]),
        ("api_key = ['']", {}, ["api_key"]),
        ("port =", {}, ["TOML"]),
    ],
)
def test_a_wrong_value_is_named_with_its_source(
    tmp_path: Path, text: str, env: Any, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, env=env)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"must be readable, got nowhere\.toml"):
        read_settings({}, file="nowhere.toml")


def test_secrets_are_never_told(tmp_path: Path) -> None:
    settings = read(tmp_path, "api_key = 'hidden'", env={})
    assert settings.config.api_key[0].get_secret_value() == "hidden"
    assert "hidden" not in str(settings.listed())
    several = read_settings({}, {"SERVAX_API_KEY": "a,b"})
    assert [key.get_secret_value() for key in several.config.api_key] == ["a", "b"]


def test_several_models(tmp_path: Path) -> None:
    text = "[[models]]\nmodel = 'minilm'\nmax_batch = 4\n[[models]]\nmodel = 'mine:model'"
    first, second = read(tmp_path, text).config.served
    assert (first.model, first.max_batch, second.model, second.max_batch) == ("minilm", 4, "mine:model", None)
    assert [one.model for one in ServeConfig().served] == ["minilm"]


def test_every_option_has_a_flag_with_its_help() -> None:
    text = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for path in option_paths():
        if path not in ("model", "models"):
            assert "--" + path.replace(".", "-").replace("_", "-")[:24] in text, path


@given(st.dictionaries(st.text(max_size=12), st.integers() | st.text(max_size=4), max_size=3))
def test_any_mapping_of_variables_is_taken_or_refused_by_name(environment: dict[str, str]) -> None:
    named = {f"SERVAX_{key}": str(value) for key, value in environment.items()}
    with contextlib.suppress(ConfigError):
        read_settings({}, named)


def test_the_file_in_the_docs_is_one(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
    block = page.read_text().split("```toml\n")[1].split("```")[0]
    settings = read(tmp_path, block)
    assert [one.model for one in settings.config.served] == ["minilm", "my_models:classifier"]
    assert settings.config.queue.client_rows == 512
