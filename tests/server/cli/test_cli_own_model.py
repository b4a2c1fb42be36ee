"""`module:attribute` names a model of the user's own: where it is looked for, and what it may be."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servax.server.cli.wiring import import_attribute, resolve
from servax.server.config import ModelConfig
from servax.server.errors import ConfigError

MODULE = """
import servax


class Tokenizer:
    max_tokens, vocab_size = 8, 10


def pair():
    model = servax.Servable(lambda ids: {"embedding": ids * 1.0}, inputs={"ids": "int32[length]"},
                            limits={"length": 8})
    return model, Tokenizer()


def wrong():
    return pair()[0], Tokenizer(), 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A console script's world: the folder it runs in is not on the path."""
    (tmp_path / "own_model_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("own_model_of_mine", None)


@pytest.mark.usefixtures("folder")
def test_a_file_of_the_working_folder_is_found() -> None:
    assert import_attribute("own_model_of_mine:Tokenizer").vocab_size == 10


@pytest.mark.usefixtures("folder")
def test_a_model_brings_its_tokenizer() -> None:
    found = resolve(ModelConfig(model="own_model_of_mine:pair"))
    assert found.own
    assert found.tokenizer is not None
    assert found.tokenizer.vocab_size == 10


@pytest.mark.usefixtures("folder")
def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a Servable, a pair .* got tuple"):
        resolve(ModelConfig(model="own_model_of_mine:wrong"))
