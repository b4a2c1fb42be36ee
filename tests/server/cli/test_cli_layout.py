"""Which layout a text model gets."""

import pytest
from servax.jit_cache.packed import PackedServable
from servax.server import Server
from servax.server.cli.wiring import load
from servax.server.config import ModelConfig, ServeConfig
from servax.server.errors import ConfigError
from servax.server.layout import text_servable


@pytest.mark.parametrize(
    ("options", "padded", "packed"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"layout": "packed"}, True, True),
        ({"layout": "packed", "max_elements": 256, "max_segments": 4}, False, True),
        ({"layout": "padded"}, False, False),
        ({"scheme": "linear:64"}, False, False),
        ({"max_batch": 2}, False, False),
        ({"sizes": "switched"}, False, False),
        ({"max_elements": 256}, False, False),
    ],
)
def test_texts_share_rows_unless_something_is_said_about_rows(options, padded, packed):
    found = load(ModelConfig(model="minilm", **options), padded=padded).servable
    assert isinstance(found, PackedServable) is packed
    assert found.name == "minilm"
    if packed:
        assert found.max_segments == options.get("max_segments", 16)
        assert max(b.elements for b in found.grid if b.rows > 1) <= options.get("max_elements", 1024)


class Encoder:
    task, name = "embedding", "folder/encoder"


@pytest.mark.parametrize("model", [None, "minilm", type("Writer", (), {"task": "generation"})()])
def test_only_encoders_make_one(model):
    with pytest.raises(ConfigError, match="is made of an encoder that"):
        text_servable(model)


def test_what_is_no_servable_is_refused_with_what_makes_one():
    for model in (Encoder(), "minilm", None):
        with pytest.raises(ConfigError, match=f"got {type(model).__name__}: make one"):
            Server(model)


@pytest.mark.parametrize("option", [{"scheme": "linear:64"}, {"max_batch": 8}, {"sizes": "tuned"}])
def test_packed_rows_have_a_grid_of_their_own(option):
    with pytest.raises(ConfigError, match=f"got {next(iter(option))} beside layout=packed"):
        text_servable(Encoder(), ModelConfig(layout="packed", **option))


def test_the_option_is_one_of_the_configuration():
    assert ServeConfig(layout="packed").layout == "packed"
