"""Which layout a text model gets."""

import pytest
from servax.jit_cache.packed import PackedServable
from servax.server.cli.layout import text_servable
from servax.server.cli.wiring import load
from servax.server.config import ModelConfig, ServeConfig
from servax.server.errors import ConfigError


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


@pytest.mark.parametrize("option", [{"scheme": "linear:64"}, {"max_batch": 8}, {"sizes": "tuned"}])
def test_packed_rows_have_a_grid_of_their_own(option):
    with pytest.raises(ConfigError, match=f"got {next(iter(option))} beside layout=packed"):
        text_servable(None, ModelConfig(layout="packed", **option), "x", padded=False)


def test_the_option_is_one_of_the_configuration():
    assert ServeConfig(layout="packed").layout == "packed"
