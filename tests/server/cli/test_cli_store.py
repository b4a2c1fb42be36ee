"""`servax store` over a store of two programs of one function, and what it says of a bad one."""

import json
from pathlib import Path
from typing import Any

import pytest
from servax.jit_cache import Servable, StoredPrograms, WarmupStep
from servax.jit_cache.store import Store
from servax.server.cli.app import app
from servax.server.cli.counting import load_counter
from servax.server.cli.store_url import check_store_url
from servax.server.metrics import Metrics
from typer.testing import CliRunner


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    servable = Servable(
        lambda *, x: x * 2, inputs={"x": "float32[length]"}, limits={"batch": 1, "length": 16}, scheme=[8, 16]
    )
    store = Store.open(tmp_path / "programs")
    programs = StoredPrograms(store)
    for bucket in servable.grid:
        programs(servable, bucket, [])
    return store


@pytest.fixture
def run(filled: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *words: CliRunner().invoke(app, ["store", *words, "--store", str(filled.root)])


def test_S5_ls_lists_every_stored_program(run: Any, filled: Store) -> None:
    listed = json.loads(run("ls", "--json").output)["programs"]
    assert sorted(one["bucket"]["length"] for one in listed) == [8, 16]
    assert all(one["bytes"] > 1000 and one["compile_s"] > 0 and one["jax"] for one in listed)
    text = run("ls").output
    assert max(map(len, text.splitlines())) <= 80
    assert all(one["digest"][:12] in text for one in listed)


def test_S1_verify_names_a_bad_entry_sets_it_aside_and_exits_with_4(run: Any, filled: Store) -> None:
    assert run("verify").exit_code == 0
    bad = filled.ls()[0].digest
    path = next(filled.root.rglob(f"{bad}*"))
    held = path.read_bytes()
    path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    result = run("verify", "--json")
    assert result.exit_code == 4
    status = {one["digest"]: one["status"] for one in json.loads(result.output)["programs"]}
    assert status.pop(bad) != "ok"
    assert list(status.values()) == ["ok"]
    assert run("verify").exit_code == 0


def test_gc_keeps_as_many_bytes_as_asked(run: Any, filled: Store) -> None:
    newest = filled.ls()[0]
    assert json.loads(run("gc", "--max-bytes", str(newest.nbytes), "--json").output)["deleted"] == 1
    assert [one.digest for one in filled.ls()] == [newest.digest]
    assert "deleted 0 files" in run("gc").output


def test_S6_explain_says_in_what_two_keys_differ(run: Any, filled: Store) -> None:
    first, second = (one.digest[:16] for one in filled.ls())
    result = run("explain", first, second)
    assert result.exit_code == 0
    assert "program.bucket.length" in result.output
    assert "model.code" not in result.output
    assert json.loads(run("explain", first, second, "--json").output)["a"].startswith(first)
    nothing = run("explain", first, "zzzz")
    assert nothing.exit_code == 3
    assert "zzzz" in nothing.output


def test_looking_makes_no_store(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["store", "ls", "--store", str(tmp_path / "none"), "--json"])
    assert json.loads(result.output)["programs"] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["serve", "warmup"])
@pytest.mark.parametrize("url", ["badscheme://x", "simplecache::badscheme://x"])
def test_a_store_of_an_unknown_scheme_is_refused_at_the_start(command: str, url: str) -> None:
    result = CliRunner().invoke(app, [command, "no_such_module:model", "--store", url])
    assert result.exit_code == 3
    said = " ".join(result.stderr.split())
    assert f"fsspec knows, such as s3 or gs, got {url!r}; correct 'badscheme' or name a directory" in said
    assert "listening" not in said


def test_a_store_of_a_known_scheme_is_taken() -> None:
    for location in (None, "some/folder", "memory://x", "simplecache::memory://x"):
        check_store_url(location)


def test_a_step_that_the_end_cuts_short_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    metrics, ended = Metrics(), [False]
    seen: list[str] = []
    count = load_counter(metrics, lambda model, step: seen.append(model), lambda: ended[0])
    step = WarmupStep("4", 1, 2, 0.1, error="a closed server runs nothing")
    with caplog.at_level("INFO", logger="servax.programs"):
        count("failed", step)
        assert "program failed" in caplog.text
        caplog.clear()
        ended[0] = True
        count("stopped", step)
    assert seen == ["failed"]
    assert caplog.text == ""
    assert [one["model"] for one in metrics.events.listed()] == ["failed"]
