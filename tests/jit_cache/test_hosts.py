"""A model over the devices of two processes, and each process with its own; on CPU, collectives over TCP."""

import json
import time
from multiprocessing import Pipe

import pytest
from servax.jit_cache import CompileError, Hosts, Servable, SignatureError, follow
from servax.jit_cache.handshake import reach


@pytest.fixture(scope="module")
def found(two_processes, tmp_path_factory):
    """What the leader and the one that follows it found."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "home").mkdir(mode=0o700)
    return two_processes("processes_probe.py", folder)


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


def test_S4_each_process_serves_its_own_devices_and_both_start_from_one_store(found):
    loaded, compiled = (sum(counts) for counts in zip(*(one["own"]["first"] for one in found), strict=True))
    assert (loaded, compiled) == (3, 3)
    for one in found:
        assert one["own"]["again"] == [3, 0]


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
        other.send_bytes(json.dumps([["compile", "", *program], ""]).encode())
    with (
        pytest.raises(CompileError, match="no memory"),
        hosts.compiling("model", version, ["model", "padded", "", (3,)], "bucket here"),
    ):
        other.send_bytes(json.dumps([["compile", "", "model", "padded", "", [3]], "no memory"]).encode())


def test_only_the_first_program_waits_for_those_that_do_not_come_and_they_may_be_late(
    monkeypatch, free_ports
):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    address, version, waits = ("127.0.0.1", free_ports(1)[0]), object(), []
    hosts = Hosts(address, b"known to both of them", wait_s=1.5)
    for size in range(3):
        begin_s = time.monotonic()
        with (
            pytest.raises(CompileError, match="not all came"),
            hosts.compiling("model", version, ["model", "padded", "", (size,)], "bucket"),
        ):
            pass
        waits.append(time.monotonic() - begin_s)
    assert waits[0] > 1.4 > max(waits[1:])
    with reach(address, hosts.secret) as late:
        hosts._joining.result(10)
        with hosts.compiling("model", version, ["model", "padded", "", (4,)], "bucket"):
            asked = json.loads(late.recv_bytes())
            assert asked == ["compile", "", "model", "padded", "", [4]]
            late.send_bytes(json.dumps([asked, ""]).encode())
    hosts.close()
