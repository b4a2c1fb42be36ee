"""What deploy/Containerfile runs: an offline warm-up, then a start that compiles nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

TEXT = (Path(__file__).resolve().parent.parent.parent / "deploy" / "Containerfile").read_text()
MODELS = """
import jax.numpy as jnp
import servax


def mean(params, x, mask):
    total = jnp.where(mask, x * params, 0.0).sum(1)
    return {"mean": total / jnp.maximum(mask.sum(1), 1)}


def model():
    return servax.Servable(
        mean, jnp.float32(2), inputs={"x": "float32[length]", "mask": "mask[length]"},
        limits={"length": 16, "batch": 2}, scheme="powers_of_two:8", name="mean",
    )
"""
CLI = [sys.executable, "-m", "servax.server.cli"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The image's user: a home of its own, the working folder with its files, the image's variables."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "models.py").write_text(MODELS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SERVAX_"))}
    variables = dict(re.findall(r"^ENV (\w+)=(\S+)$", TEXT, re.MULTILINE))
    return {**kept, **variables, "HOME": str(tmp_path)}


def test_W1_an_image_ships_warm(home: dict[str, str], tmp_path: Path) -> None:
    (build,) = re.findall(r"^RUN servax (.+)$", TEXT, re.MULTILINE)
    start = json.loads(re.findall(r"^CMD (.+)$", TEXT, re.MULTILINE)[0])
    assert start[0] == "servax"
    app = tmp_path / "app"
    done = subprocess.run(
        [*CLI, *build.split()], cwd=app, env=home, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    local = ["127.0.0.1" if word == "0.0.0.0" else word for word in start[1:]]
    process = subprocess.Popen(
        [*CLI, *local, "--port", "0"], cwd=app, env=home, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        url = re.search(r"http://[\w.:]+", process.stderr.readline()).group()
        said = ""
        while not said.startswith(("ready", "error")):
            said = process.stderr.readline()
            assert said, "the server ended before it was ready"
        assert said.startswith("ready"), said
        counted = dict(
            re.findall(r"^(servax_\w+\{[^}]*\}) (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
        )
        assert float(counted['servax_compiles_total{phase="warmup"}']) == 0
        assert float(counted['servax_compiles_total{phase="request"}']) == 0
        loaded = [
            float(value) for name, value in counted.items() if name.startswith("servax_program_loads_total")
        ]
        assert sum(loaded) >= 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
        process.stderr.close()
