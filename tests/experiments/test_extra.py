"""Experiments without the extra `experiments`: each can be started, and says what a figure needs."""

import subprocess
import sys

import pytest
from servax.experiments import continuous_batching, dynamic_vs_sequential, extra, load, scale

_BLOCKED = """
import importlib, pkgutil, sys
for name in ("matplotlib", "onnx"):
    sys.modules[name] = None
import servax.experiments
for one in pkgutil.iter_modules(servax.experiments.__path__):
    if one.name not in {"figures", "load_figure", "dynamic_figure", "peers"}:
        importlib.import_module(f"servax.experiments.{one.name}")
"""


def test_every_experiment_is_imported_without_the_extra():
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_package_ends_the_command_with_a_remedy():
    extra.require("numpy")
    with pytest.raises(
        SystemExit, match=r"no_such_package cannot be imported: pip install '\.\[experiments\]'"
    ):
        extra.require("numpy", "no_such_package")


@pytest.mark.parametrize(
    ("module", "option"),
    [
        (load, "figures"),
        (scale, "figures"),
        (continuous_batching, "figures"),
        (dynamic_vs_sequential, "plot"),
    ],
)
def test_figures_are_refused_before_anything_is_measured(monkeypatch, tmp_path, module, option):
    monkeypatch.setattr(extra, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="matplotlib"):
        module.main(**{option: tmp_path / "figure"})
