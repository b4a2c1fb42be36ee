"""`servax doctor`: a verdict for each check, and an exit code for all of them."""

import json
from collections.abc import Iterable
from pathlib import Path

import jax
import pytest
from servax.server.cli import app, doctor_checks
from servax.server.cli.doctor import table_of, verdict
from servax.server.cli.doctor_checks import Found, disk, features, run_check, wanted
from typer.testing import CliRunner


def test_this_installation_is_examined(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--store", str(tmp_path / "programs")])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    verdicts = {one["check"]: one["verdict"] for one in told["checks"]}
    assert verdicts["jax"] in ("ok", "warn")
    assert verdicts["compile"] == verdicts["store round trip"] == verdicts["store"] == "ok"
    assert {"servax", "devices", "disk", "extra serve"} <= set(verdicts)
    assert told["verdict"] in ("ok", "warn")


def test_an_unsafe_store_fails_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = tmp_path / "programs"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    monkeypatch.setattr("servax.server.cli.doctor.CHECKS", (doctor_checks.program_store,))
    result = CliRunner().invoke(app, ["doctor", "--store", str(unsafe / "deeper")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, "a folder of its own inside it is safe"
    (unsafe / "v1").mkdir()
    (unsafe / "v1").chmod(0o777)
    result = CliRunner().invoke(app, ["doctor", "--store", str(unsafe)])
    assert result.exit_code == 4
    assert "not fit to serve" in result.output
    (found,) = run_check(doctor_checks.program_store, str(unsafe))
    assert "chmod go-w" in found.detail


def test_a_cache_of_jax_beside_the_store_is_told(tmp_path: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    assert before or list(doctor_checks.jax_cache(None)) == []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        (found,) = doctor_checks.jax_cache(None)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (found.verdict, str(tmp_path) in found.detail) == ("warn", True)
    assert "unset JAX_COMPILATION_CACHE_DIR" in found.remedy


def test_a_check_that_breaks_is_a_failure_and_hides_no_other() -> None:
    def bad(store: str | None) -> Iterable[Found]:
        yield Found("first", "ok", "")
        raise OSError("no such [thing]")

    (found,) = run_check(bad, None)
    assert (found.verdict, found.detail) == ("fail", "OSError: no such [thing]")
    assert verdict([Found("a", "ok", ""), found, Found("b", "warn", "")]) == "fail"
    assert verdict([Found("a", "ok", ""), Found("b", "warn", "")]) == "warn"
    assert verdict([]) == "ok"
    assert table_of([found]).row_count == 1


@pytest.mark.parametrize(("free", "expected"), [(10 << 30, "ok"), (100 << 20, "warn"), (1 << 20, "fail")])
def test_little_disk_is_told(free: int, expected: str) -> None:
    assert disk(free, "somewhere").verdict == expected


def test_old_processors_are_told() -> None:
    assert [one.verdict for one in features("x86_64", ["sse4_2", "avx"])] == ["warn"]
    assert [one.verdict for one in features("x86_64", ["avx2", "fma"])] == ["ok"]
    assert [one.verdict for one in features("aarch64", [])] == ["ok"]


def test_extras_are_read_from_the_distribution() -> None:
    lines = [
        "jax>=0.10",
        'fastapi>=0.115; extra == "serve"',
        'servax[models]; extra == "serve"',
        "flax>=0.12; extra == 'models'",
        'pytest>=8; extra == "test"',
    ]
    assert wanted(lines) == {"serve": ["fastapi"], "models": ["flax"]}


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'no-such-distribution-x>=1; extra == "otel"'
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [line])
    (found,) = doctor_checks.extras(None)
    assert (found.check, found.verdict) == ("extra otel", "warn")
    assert "pip install 'servax[otel]'" in found.remedy
