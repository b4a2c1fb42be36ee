"""`servax serve --config`: several models, keys, TLS on both protocols, JSON logs, as a process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from servax.server.rpc.messages import MESSAGES, SERVICE
from servax.server.rpc.testing import infer_request

trustme = pytest.importorskip("trustme", reason="TLS needs a certificate, which trustme makes")

SERVABLES = """
import jax.numpy as jnp
import servax


def make(name, factor):
    return servax.Servable(
        lambda params, *, x: {"y": x * params}, jnp.float32(factor), inputs={"x": "float32[length]"},
        limits={"length": 8, "batch": 2}, scheme="powers_of_two:8", name=name,
    )


def double():
    return make("double", 2)


def triple():
    return make("triple", 3)
"""
CONFIG = """
port = 0
grpc_port = {port}
use_store = false
max_wait_ms = 1.5
log_format = "json"
api_key = ["s3cret-key"]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[queue]
elements = 10000
client_rows = 50
[[models]]
model = "two_servables:double"
[[models]]
model = "two_servables:triple"
"""
X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("config")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for part in certificate.cert_chain_pems:
        part.write_to_path(str(folder / "cert.pem"), append=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "two_servables.py").write_text(SERVABLES)
    port = free_port()
    (folder / "servax.toml").write_text(CONFIG.format(folder=folder, port=port))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "SERVAX_TIMEOUT_S": "20",
        "SERVAX_CONFIG": str(folder / "servax.toml"),
    }
    command = [sys.executable, "-m", "servax.server.cli", "serve", "--log-level", "info"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        lines = [running.stderr.readline()]
        ready = threading.Event()

        def read(stream: Any) -> None:
            for line in stream:
                lines.append(line)
                if line.startswith(("ready", "error")):
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, args=(running.stderr,))
        reader.start()
        assert ready.wait(120), lines
        url = next(word.rstrip(",") for word in lines[0].split() if word.startswith("https"))
        yield running, url, port, folder, lines
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        reader.join(10)


@pytest.fixture
def client(process: Any) -> Iterator[httpx.Client]:
    import ssl

    _, url, _, folder, _ = process
    context = ssl.create_default_context(cafile=str(Path(folder) / "ca.pem"))
    headers = {"authorization": "Bearer s3cret-key"}
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=60) as made:
        yield made


def test_several_models_answer_over_tls(client: httpx.Client) -> None:
    for name, values in (("double", [2, 4]), ("triple", [3, 6])):
        answer = client.post(f"/v2/models/{name}/infer", json={"inputs": [X]})
        assert answer.json()["outputs"][0]["data"] == values


def test_a_key_is_asked_for(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"authorization": "Bearer no"}).status_code == 401
    assert client.get("/v2/health/ready", headers={"authorization": "Bearer no"}).status_code == 200


def test_Q9_the_options_in_force_are_told(client: httpx.Client) -> None:
    response = client.get("/v2/models/triple/config")
    options = response.json()["options"]
    assert options["max_wait_ms"] == {"value": 1.5, "source": "file"}
    assert options["queue.client_rows"] == {"value": 50, "source": "file"}
    assert options["timeout_s"] == {"value": 20.0, "source": "env"}
    assert options["log_level"] == {"value": "info", "source": "flag"}
    assert options["drain_s"]["source"] == "default"
    assert "s3cret" not in response.text


def test_grpc_has_the_same_key_and_certificate(process: Any) -> None:
    _, _, port, folder, _ = process
    credentials = grpc.ssl_channel_credentials((Path(folder) / "ca.pem").read_bytes())
    raw = MESSAGES["ModelReadyRequest"](name="double").SerializeToString()
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady")
        answer = ready(raw, metadata=(("authorization", "Bearer s3cret-key"),), timeout=30)
        assert MESSAGES["ModelReadyResponse"].FromString(answer).ready
        with pytest.raises(grpc.RpcError) as caught:
            ready(raw, timeout=30)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        metadata = (("x-api-key", "s3cret-key"), ("x-request-id", "by-grpc"))
        infer(infer_request("triple", [tensor]).SerializeToString(), metadata=metadata, timeout=30)
        live = channel.unary_unary(f"/{SERVICE}/ServerLive")
        assert MESSAGES["ServerLiveResponse"].FromString(live(b"", timeout=30)).live


def test_the_log_is_json_with_the_ids(process: Any, client: httpx.Client) -> None:
    lines = process[4]
    client.get("/v1/models", headers={"x-request-id": "find-me"})
    until_s = time.monotonic() + 30
    while True:  # the pipe is read by a thread
        logged = [json.loads(line) for line in list(lines) if line.startswith("{")]
        ids = {one.get("request_id") for one in logged if one["logger"] == "servax.access"}
        if {"find-me", "by-grpc"} <= ids:
            break
        assert time.monotonic() < until_s
    programs = [one for one in logged if one["logger"] == "servax.programs"]
    assert {one["model"] for one in programs} == {"double", "triple"}


def test_a_certificate_that_is_not_there_is_named_and_exits_with_3(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.pem")
    command = [sys.executable, "-m", "servax.server.cli", "serve", "--port", "0"]
    command += ["--tls-cert", missing, "--tls-key", missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "TLS needs" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_file_is_named_and_exits_with_2(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("max_wait = 3")
    command = [sys.executable, "-m", "servax.server.cli", "serve", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "max_wait_ms" in done.stderr
    assert "Traceback" not in done.stderr
