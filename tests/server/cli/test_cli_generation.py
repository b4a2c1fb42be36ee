"""From options to the server of a language model, without a compile."""

import json
from typing import Any

import numpy as np
import pytest
import servax
from servax.models import tiny
from servax.server.cli import wiring
from servax.server.cli.writers import Writer
from servax.server.config import ModelConfig, ServeConfig
from servax.server.errors import ConfigError
from servax.server.fleet import Fleet
from servax.server.generation import GenerationServer, StepRecord
from servax.server.metrics import Metrics
from servax.server.settings import read_settings

TINY = "servax.models:tiny"


def double() -> Any:
    return servax.Servable(lambda x: x * 2, inputs={"x": "float32[4]"}, limits={"batch": 1}, name="double")


def build(**options: Any) -> Any:
    server, texts = wiring.build(ServeConfig(use_store=False, **options), Metrics())
    assert texts == {}
    return server


def test_one_language_model_is_a_server_of_its_own() -> None:
    server = build(
        model=TINY,
        name="writer",
        max_batch=4,
        timeout_s=9.0,
        generation={"cache_tokens": 100, "page_size": 16, "prefill_chunk": 32, "prefix_cache": False},
    )
    assert isinstance(server, GenerationServer)
    assert list(server.models) == ["writer"]
    force = server.options
    assert (force["pages"], force["page_size"], force["max_rows"]) == (2 + 7, 16, 4)
    assert (force["prefill_chunk"], force["prefix_cache"], force["timeout_s"]) == (32, False, 9.0)
    assert wiring.facts_table(server) == []
    assert wiring.left_over(server) == []


def test_a_language_model_is_not_copied() -> None:
    with pytest.raises(ConfigError, match="2 were asked for and all models here write text"):
        build(model=TINY, replicas=2)


@pytest.mark.parametrize(
    ("budget", "pages"), [(None, 2 + 2 * 8), ("auto", 2 + 2 * 8), ("1000000000", 2 + 16)]
)
def test_pages_follow_the_memory_that_is_named(budget: str | None, pages: int) -> None:
    # 2 texts of the model's 512 tokens; by default 1,024 tokens each, or the model's limit.
    assert build(model=TINY, max_batch=2, memory_budget=budget).options["pages"] == pages


def test_several_models_are_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servax.double", double, raising=False)
    metrics = Metrics()
    config = ServeConfig(
        use_store=False,
        models=(
            ModelConfig(model=TINY, name="a", max_batch=1),
            ModelConfig(model="servax:double"),
            ModelConfig(model=TINY, name="b", max_batch=2),
        ),
    )
    server, _ = wiring.build(config, metrics)
    assert isinstance(server, Fleet)
    assert sorted(server.models) == ["a", "b", "double"]
    assert metrics.value("servax_rows", model="b", state="running") == 0
    assert "servax_free_pages" in metrics.render().decode()
    assert wiring.left_over(server) == ["double 1"]
    with pytest.raises(ConfigError, match="distinct names"):
        wiring.build(
            ServeConfig(use_store=False, models=(ModelConfig(model=TINY), ModelConfig(model=TINY))), metrics
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "linear:8"}, "got scheme='linear:8'"),
        ({"max_elements": 10}, "got max_elements=10"),
        ({"max_length": 10}, "brings its own limit, got max_length=10"),
        ({"quantize": "int8"}, "brings its own weights, got quantize='int8'"),
        ({"dtype": "bfloat16"}, "brings its own weights, got dtype='bfloat16'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(model=TINY, **options)


def test_options_of_language_models_are_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servax.double", double, raising=False)
    with pytest.raises(ConfigError, match=r"got generation.page_size for 'servax:double'"):
        build(model="servax:double", generation={"page_size": 8})


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantize": "int8", "max_length": 9}]
)
def test_options_of_weights_reach_the_loader(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def loader(name: str, **options: Any) -> Any:
        asked.update(options)
        return tiny()

    monkeypatch.setattr("servax.loader", loader, raising=False)
    monkeypatch.setattr(wiring, "LOADER", "servax:loader")
    assert isinstance(wiring.load(ModelConfig(model="smollm2", **options)), Writer)
    want = {"max_tokens": options.get("max_length"), "dtype": None, "quantize": None}
    assert asked == {name: options.get(name, value) for name, value in want.items()}


def test_two_kinds_of_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes no dtype beside it, got quantize='int8' and dtype='bfloat"):
        build(model="smollm2", dtype="bfloat16", quantize="int8")


def test_a_dtype_that_is_not_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"dtype .*'float32' or 'bfloat16'.* 'float16'"):
        read_settings({"dtype": "float16"}, {})
    monkeypatch.setattr("servax.double", double, raising=False)
    with pytest.raises(ConfigError, match="got dtype for 'servax:double'"):
        build(model="servax:double", dtype="bfloat16")


def test_commands_about_buckets_name_what_they_are_for() -> None:
    assert isinstance(wiring.load(ModelConfig(model=TINY)), Writer)
    with pytest.raises(ConfigError, match="generates text, by programs of its own"):
        wiring.resolve(ModelConfig(model=TINY))


def test_options_have_flags_variables_and_tables(tmp_path: Any) -> None:
    file = tmp_path / "servax.toml"
    file.write_text("[generation]\ncache_tokens = 1000\npage_size = 8\n")
    settings = read_settings(
        {"generation.page_size": 32, "generation.prefix_cache": False},
        {"SERVAX_GENERATION__PREFILL_CHUNK": "16"},
        str(file),
    )
    shown = settings.listed()
    assert shown["generation.cache_tokens"] == {"value": 1000, "source": "file"}
    assert shown["generation.page_size"] == {"value": 32, "source": "flag"}
    assert shown["generation.prefill_chunk"] == {"value": 16, "source": "env"}
    assert settings.config.generation.prefix_cache is False
    file.write_text("[[models]]\nmodel = 'smollm2'\n[models.generation]\ncache_token = 1\n")
    with pytest.raises(ConfigError, match="cache_token"):
        read_settings({}, {}, str(file))
    file.write_text("[[models]]\nmodel = 'smollm2'\n[models.generation]\ncache_tokens = 64\n")
    served = read_settings({}, {}, str(file)).config.served
    assert served[0].generation.cache_tokens == 64
    assert json.dumps(read_settings({}, {}, str(file)).listed())


def test_steps_are_counted() -> None:
    metrics = Metrics()
    metrics.step_record("writer", StepRecord("decode", 8, 3, 3, 8, 0.5, 7))
    labels = {"model": "writer", "bucket": "decode 8x1"}
    assert metrics.value("servax_batch_rows_total", **labels) == 3
    assert metrics.value("servax_batch_computed_total", **labels) == 8
    assert np.isclose(metrics.value("servax_batch_wasted_seconds_total", **labels), 0.5 * 5 / 8)
