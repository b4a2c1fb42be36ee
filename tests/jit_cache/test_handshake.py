"""Who connects to a leader: strangers are sent away and stop nobody, whatever they send or do not send."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest
from servax.jit_cache import handshake

SECRET = b"known to both of them"


@pytest.fixture
def gathering(monkeypatch):
    """A leader that waits for one other process, where it is, and what came of it."""
    monkeypatch.setattr(handshake, "_TAKES_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(handshake.gather, address, SECRET, 1)
        yield address, future
        if not future.done():  # or its thread would never end
            reached(address)


def reached(address):
    connected(address).close()
    return handshake.reach(address, SECRET)


def connected(address):
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        try:
            return socket.create_connection(address, 10)
        except ConnectionRefusedError:  # it does not listen yet
            continue
    raise AssertionError("nobody listens")


def test_messages_go_both_ways_once_both_have_proved_the_secret(gathering):
    address, future = gathering
    with reached(address) as follower, future.result(10)[0] as leader:
        leader.send_bytes(b"run")
        assert follower.recv_bytes() == b"run"
        follower.send_bytes(b"done")
        assert leader.recv_bytes() == b"done"


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"", b"\0" * 64, b"x" * 100_000])
def test_strangers_stop_nobody(gathering, sent):
    address, future = gathering
    with connected(address) as stranger:  # one that sends nothing stays connected all the while
        stranger.sendall(sent)
        with reached(address), future.result(10)[0]:
            pass


def test_another_secret_is_refused_and_said(gathering):
    address, future = gathering
    connected(address).close()
    with pytest.raises(AuthenticationError, match="another secret"):
        handshake.reach(address, b"something else altogether")
    assert not future.done()


def test_a_proof_cannot_be_sent_back(gathering):
    """One that echoes what it gets, number and proof, has proved nothing."""
    address, future = gathering
    with connected(address) as mirror:
        while part := _received(mirror):
            mirror.sendall(part)
    assert not future.done()


def _received(one):
    try:
        return one.recv(4096)
    except ConnectionError:
        return b""
