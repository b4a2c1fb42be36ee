"""A model over the devices of two processes, and each process with its own; on CPU, collectives over TCP."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path

import pytest
from servax.jit_cache import CompileError, Hosts, Servable, SignatureError, follow
from servax.jit_cache.handshake import reach


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the leader and the one that follows it found."""
    folder, script = tmp_path_factory.mktemp("processes"), Path(__file__).with_name("processes_probe.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ports = free_ports(2)
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(number), *ports, str(folder)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        told = [one.communicate(timeout=240) for one in both]
    finally:
        for one in both:
            one.kill()
    for one, (_, errors) in zip(both, told, strict=True):
        assert one.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def test_a_model_over_two_processes_answers_as_on_one_device(found):
    leader, _ = found
    for name in ("padded", "packed", "after"):
        assert leader[name] <= 1e-5, name  # a sum over two devices has another order


def test_only_the_first_process_serves_it(found):
    assert "process 0 serves a model that is spread over several" in found[1]["served"]


def test_it_is_not_replaced_while_it_is_served(found):
    assert "got another version of 'padded'" in found[0]["replaced"]


def test_without_the_others_the_device_counts_as_failed(found):
    leader, _ = found
    assert leader["alone"].startswith("DeviceFailed: ")
    assert "restart all of them" in leader["alone"]
    assert not leader["ready"]


def test_each_process_serves_its_own_devices_and_starts_from_its_store(found):
    for one in found:
        assert one["own"] == {"first": [0, 6], "again": [6, 0]}


def test_what_is_refused_across_processes(found):
    for one in found:
        refused = one["refused"]
        assert "give hosts and take jax.devices()" in refused["without hosts"]
        assert "of all of them and hosts" in refused["a part of them"]
        assert "devices of several processes" in refused["switched"]
        assert "a group of processes for each copy" in refused["copies"]
        assert "follow models that are spread over several" in refused["leader"]


def test_a_secret_is_long():
    with pytest.raises(SignatureError, match="at least 16 bytes; got 5"):
        Hosts(("localhost", 1), b"short")


def test_a_model_of_one_process_is_not_followed():
    with pytest.raises(SignatureError, match="serve them here"):
        follow(Servable(lambda x: x, inputs={"x": "float32[4]"}))


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_program():
    hosts, version = Hosts(("localhost", 1), b"known to both of them", wait_s=0.05), object()
    one, other = Pipe()
    hosts._others = [one]
    first, second = (["model", "padded", "", (size,)] for size in (1, 2))
    for program in (first, second):
        with (
            pytest.raises(CompileError, match="another one: it took longer than 0"),
            hosts.compiling("model", version, program, "bucket here"),
        ):
            pass
        other.send_bytes(json.dumps([program, ""]).encode())
    with (
        pytest.raises(CompileError, match="no memory"),
        hosts.compiling("model", version, ["model", "padded", "", (3,)], "bucket here"),
    ):
        other.send_bytes(json.dumps([["model", "padded", "", [3]], "no memory"]).encode())


def test_only_the_first_program_waits_for_those_that_do_not_come_and_they_may_be_late(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    address, version, waits = ("127.0.0.1", int(free_ports(1)[0])), object(), []
    hosts = Hosts(address, b"known to both of them", wait_s=0.3)
    for size in range(3):
        begin_s = time.monotonic()
        with (
            pytest.raises(CompileError, match="not all came"),
            hosts.compiling("model", version, ["model", "padded", "", (size,)], "bucket"),
        ):
            pass
        waits.append(time.monotonic() - begin_s)
    assert waits[0] > 0.25 > max(waits[1:])
    with reach(address, hosts.secret) as late:
        hosts._joining.result(10)
        with hosts.compiling("model", version, ["model", "padded", "", (4,)], "bucket"):
            what, *program = json.loads(late.recv_bytes())
            assert (what, program) == ("compile", ["model", "padded", "", [4]])
            late.send_bytes(json.dumps([program, ""]).encode())
    hosts.close()
