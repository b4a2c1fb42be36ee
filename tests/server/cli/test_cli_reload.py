"""SIGHUP as an operator sends it: new weights under load, and weights that cannot be read."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from servax.server.cli import reload
from servax.server.config import ModelConfig
from servax.server.metrics import Metrics

MODEL = """
import pathlib

import numpy as np
import servax


def make():
    weight = np.float32(pathlib.Path(__file__).with_name("weight").read_text())
    return servax.Servable(
        lambda weight, x: x * 0 + weight, weight, inputs={"x": "float32[n]"}, limits={"n": 8}, name="m"
    )
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
_PATIENCE_S = 60.0


@pytest.fixture
def served(tmp_path: Path, environment_of: Any, start_serve: Any) -> Iterator[Any]:
    (tmp_path / "reloaded.py").write_text(MODEL)
    weight = tmp_path / "weight"
    weight.write_text("1")
    running = start_serve(environment_of(tmp_path), "reloaded:make", "--no-store")
    running.settle_ready()
    with httpx.Client(base_url=running.url, timeout=_PATIENCE_S) as client:
        yield running.process, client, weight, running.lines
    assert running.stop() == 0


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < end_s


def sample(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_W7_new_weights_are_served_without_a_failure_or_a_compile(served: Any) -> None:
    running, client, weight, said = served
    answers: list[float] = []
    stop, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                reply = client.post("/v2/models/m/infer", json=BODY).raise_for_status().json()
                answers.append(reply["outputs"][0]["data"][0])
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    compiles = sample(client, 'servax_compiles_total{phase="warmup"}')
    weight.write_text("2")
    running.send_signal(signal.SIGHUP)
    until(lambda: bool(failures) or answers[-1:] == [2.0])
    weight.write_text("none")
    running.send_signal(signal.SIGHUP)
    until(lambda: sample(client, 'servax_reloads_total{model="reloaded:make",outcome="failed"}') == 1)
    heard = len(answers)
    until(lambda: bool(failures) or len(answers) > heard)
    stop.set()
    asking.join(_PATIENCE_S)
    assert failures == []
    assert answers == sorted(answers)
    assert set(answers) == {1.0, 2.0}
    assert sample(client, 'servax_reloads_total{model="reloaded:make",outcome="done"}') == 1
    assert sample(client, 'servax_compiles_total{phase="warmup"}') == compiles > 0
    assert sample(client, 'servax_compiles_total{phase="request"}') == 0
    until(lambda: any("the old one stays" in line and "none" in line for line in said))


def test_a_loader_that_asks_for_the_end_ends_its_own_reload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "load", lambda *_, **__: sys.exit("no"))
    metrics, engine = Metrics(), cast(Any, SimpleNamespace(draining=False))

    def failed() -> float:
        return metrics.value("servax_reloads_total", model="a:b", outcome="failed")

    reloader = reload.Reloader(engine, [ModelConfig(model="a:b")], {}, metrics)
    for count in (1, 2):
        reloader.ask()
        until(lambda least=count: failed() >= least)
    reloader.join(_PATIENCE_S)
