"""`servax serve` and `servax warmup` as processes, on a servable small enough to warm in a moment."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

SERVABLES = """
import jax.numpy as jnp
import servax

tiny = servax.Servable(
    lambda params, *, x: {"y": x * params},
    jnp.float32(2),
    inputs={"x": "float32[length]"},
    limits={"length": 16, "batch": 2},
    scheme="powers_of_two:8",
    name="tiny",
)


def fails(params, *, x):
    if x.shape[1] == 8 and x.shape[0] == 2:
        raise RuntimeError("no such kernel for 8")
    return {"y": x * params}


def make_lost():
    def mean(params, *, x):
        def net(x, train):
            return x * params

        return {"y": net(x)}

    return servax.Servable(
        mean, jnp.float32(2), inputs={"x": "float32[length]"}, limits={"length": 16, "batch": 2},
        scheme="powers_of_two:8", name="lost",
    )


def make_broken():
    return servax.Servable(
        fails, jnp.float32(2), inputs={"x": "float32[length]"}, limits={"length": 16, "batch": 2},
        scheme="powers_of_two:8", name="broken",
    )
"""


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, environment_of: Callable[[Path], dict[str, str]]
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("servables")
    (folder / "my_servables.py").write_text(SERVABLES)
    return environment_of(folder)


def servax(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servax.server.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def serving(environment: dict[str, str], start_serve: Callable[..., Any]) -> Callable[..., Any]:
    return partial(start_serve, environment)


def test_W1_warmup_lists_every_program(environment: dict[str, str]) -> None:
    done = servax(environment, "warmup", "my_servables:tiny", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"]
    assert len(result["programs"]) == 4
    assert all(row["error"] is None and row["compile_s"] > 0 for row in result["programs"])
    assert "4 of 4" in done.stderr


def test_W1_after_an_offline_warmup_a_server_compiles_nothing(
    environment: dict[str, str], serving: Any, tmp_path: Path
) -> None:
    store = str(tmp_path / "programs")
    first = servax(environment, "warmup", "my_servables:tiny", "--json", "--store", store)
    assert {row["source"] for row in json.loads(first.stdout)["programs"]} == {"compiled"}
    process = serving("my_servables:tiny", "--store", store)
    process.settle()
    text = httpx.get(f"{process.url}/metrics").text
    assert 'servax_compiles_total{phase="warmup"} 0.0' in text
    assert 'servax_program_loads_total{phase="warmup",source="store"} 4.0' in text
    assert process.stop() == 0


def test_W2_a_bucket_that_fails_is_named_and_exits_with_4(environment: dict[str, str]) -> None:
    done = servax(environment, "warmup", "my_servables:make_broken", "--json")
    assert done.returncode == 4, done.stderr
    failed = [row for row in json.loads(done.stdout)["programs"] if row["error"]]
    assert len(failed) == 1
    assert "no such kernel" in failed[0]["error"]
    assert "Traceback" not in done.stderr


def test_serve_opens_early_serves_and_drains(serving: Any) -> None:
    process = serving("my_servables:tiny", "--max-wait-ms", "1", "--no-store")
    with httpx.Client(base_url=process.url, timeout=60) as client:
        assert client.get("/v2/health/live").status_code == 200
        process.settle()
        assert client.get("/v2/health/ready").status_code == 200
        x = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}
        answer = client.post("/v2/models/tiny/infer", json={"inputs": [x]})
        assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8, 10, 12]
        text = client.get("/metrics").text
        assert 'servax_compiles_total{phase="request"} 0.0' in text
        assert 'servax_compiles_total{phase="warmup"} 0.0' not in text
        # A batch is counted while the next one runs, or a moment after its answers.
        assert any('servax_batch_rows_total{bucket="' in client.get("/metrics").text for _ in range(100))
    assert process.stop() == 0
    assert not any("Traceback" in line for line in process.lines)


def test_ctrl_c_drains_too(serving: Any) -> None:
    process = serving("my_servables:tiny")
    process.settle()
    assert process.stop(signal.SIGINT) == 0


def test_a_signal_while_loading_exits_with_0(serving: Any) -> None:
    process = serving("my_servables:tiny")
    assert httpx.get(f"{process.url}/v2/health/live", timeout=60).status_code == 200
    assert process.stop() == 0


def test_W2_a_failed_bucket_keeps_ready_503_and_names_it(serving: Any) -> None:
    process = serving("my_servables:make_broken")
    process.settle()
    ready = httpx.get(f"{process.url}/v2/health/ready", timeout=60)
    assert ready.status_code == 503
    assert ready.json()["done"] < ready.json()["total"] == 4
    assert "no such kernel" in json.dumps(ready.json()["failed"])
    assert process.stop() == 0


def test_W2_strict_exits_with_4(serving: Any) -> None:
    process = serving("my_servables:make_broken", "--strict")
    assert process.process.wait(120) == 4


def test_W2_a_server_of_which_no_model_can_get_ready_exits_with_4_and_says_why_once(serving: Any) -> None:
    process = serving("my_servables:make_lost", "--no-store", "--no-check-padding")
    assert process.process.wait(120) == 4
    process.close()
    said = "".join(process.lines)
    remedy = "bind the argument with functools.partial, or declare it in inputs"
    assert [line for line in process.lines if line.startswith("lost: 4 buckets failed") and remedy in line]
    assert "lost: 0 of 4 programs are warm, 4 failed after" in said
    assert "error: every bucket must be warm; 0 of 4 are: 4 buckets: see above" in said
    assert said.count(remedy) == 2, "once for people, once in the log"
    assert "Traceback" not in said


def test_a_model_that_does_not_load_exits_with_3(serving: Any) -> None:
    process = serving("my_servables:nothing")
    assert process.process.wait(120) == 3
    process.close()
    assert any("nothing" in line for line in process.lines[1:])
    assert not any("Traceback" in line for line in process.lines)


def test_a_taken_port_exits_with_3(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = servax(environment, "serve", "my_servables:tiny", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 3
    assert "choose another --host or --port" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_options_that_the_servable_fixes_are_refused(environment: dict[str, str]) -> None:
    done = servax(environment, "warmup", "my_servables:tiny", "--max-batch", "4")
    assert done.returncode == 3
    assert "max_batch" in done.stderr
