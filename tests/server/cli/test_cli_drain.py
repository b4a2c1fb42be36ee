"""SIGTERM as an operator sends it: a slow model with work in hand, and an idle server."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servax.server.cli.signals import StopSignals

SLOW = """
import time

import jax
import servax


def wait(x):
    time.sleep(0.25)
    return x


def make():
    return servax.Servable(
        lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        inputs={"x": "float32[4]"}, limits={"batch": 1}, name="slow",
    )
"""
HUNG_UP = """
import contextlib, os, sys
from servax.server.cli.signals import Terminal
terminal = Terminal()
print(terminal.hung_up, flush=True)
with contextlib.suppress(OSError):
    os.read(0, 1)
os.write(int(sys.argv[1]), b"%d" % terminal.hung_up)
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
def process(tmp_path: Path, environment_of: Any, start_serve: Any) -> Iterator[Any]:
    (tmp_path / "slow_servable.py").write_text(SLOW)
    running = start_serve(environment_of(tmp_path), "slow_servable:make", "--no-store", "--drain-s", "30")
    running.settle_ready()
    yield running.process, running.url
    killed = running.process.poll() is None
    running.close()
    assert "Traceback" not in "".join(running.lines)
    said = "draining for at most 30 s; a stop signal again after 1 s ends at once\n"
    assert killed or said in running.lines


def test_X4_what_was_admitted_is_answered_and_newcomers_are_sent_away(process: Any) -> None:
    running, url = process
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(21) as pool:
        answers = [pool.submit(client.post, "/v2/models/slow/infer", json=BODY) for _ in range(21)]
        waiting = 'servax_rows{model="slow",state="waiting"} 20.0'
        until_s = time.monotonic() + 30
        while waiting not in client.get("/metrics").text:
            assert time.monotonic() < until_s
        running.send_signal(signal.SIGTERM)
        while client.get("/v2/health/ready").status_code != 503:
            assert time.monotonic() < until_s
        refused = client.post("/v2/models/slow/infer", json=BODY)
        assert (refused.status_code, refused.json()["reason"]) == (503, "closed")
        assert refused.headers["connection"] == "close"
        done = [answer.result() for answer in answers]
        assert [one.status_code for one in done] == [200] * 21
        assert all(one.json()["outputs"][0]["data"] == [1, 2, 3, 4] for one in done)
        assert running.wait(30) == 0


def test_X4_an_idle_server_ends_at_once(process: Any) -> None:
    running, url = process
    assert httpx.get(f"{url}/v2/health/ready", timeout=60).status_code == 200
    begin_s = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    # A second is the bound; the rest is the interpreter's own end on a busy machine. Draining takes 30.
    assert time.monotonic() - begin_s < 10.0


def test_only_a_signal_that_comes_clearly_later_insists() -> None:
    stops = StopSignals()
    assert [stops.heard(now_s) for now_s in (5.0, 5.0, 5.4, 5.99)] == ["first", "echo", "echo", "echo"]
    assert [stops.heard(now_s) for now_s in (6.0, 60.0)] == ["insists", "insists"]


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_later_signal_ends_it_in_silence_and_one_at_once_does_not(
    process: Any, second: signal.Signals, code: int
) -> None:
    running, url = process
    many = re.compile(r'servax_rows{model="slow",state="waiting"} [2-9]\d')  # five seconds of work or more
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(client.post, "/v2/models/slow/infer", json=BODY) for _ in range(60)]
        until_s = time.monotonic() + 60
        while not many.search(client.get("/metrics").text):
            assert time.monotonic() < until_s
        begin_s = time.monotonic()
        running.send_signal(signal.SIGTERM)
        running.send_signal(second)
        while client.get("/v2/health/ready").status_code != 503:
            assert time.monotonic() < until_s
        if time.monotonic() - begin_s < 0.7:  # on a busy machine it may not be at once any more
            running.send_signal(second)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(max(0.01, begin_s + 0.9 - time.monotonic()))
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.3)
        running.send_signal(second)
        assert running.wait(30) == code
        assert any(isinstance(answer.exception(), httpx.TransportError) for answer in answers)


def test_a_terminal_that_hung_up_is_told_from_a_wish_to_reload() -> None:
    outer, inner = os.openpty()
    told, tell = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", HUNG_UP, str(tell)],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        pass_fds=[tell],
    )
    os.close(inner)
    os.close(tell)
    assert os.read(outer, 100).strip() == b"False"
    os.close(outer)  # with it the terminal is gone
    assert os.read(told, 1) == b"1"
    os.close(told)
    child.wait(30)
