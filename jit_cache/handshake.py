"""Connections between processes that share a secret, which each proves to the other before anything is read.

Both draw a number, and send a keyed hash of the two numbers and of which of them they are. Strangers are sent
away after a bounded time and have had a fixed count of bytes read, whatever they send.
"""

import hmac
import logging
import secrets
import socket
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

_log = logging.getLogger(__name__)
_DRAWN_BYTES = 32
_HASH = "sha256"
_HASH_BYTES = 32
_TAKES_S = 5.0
_ROLES = (b"servax leads", b"servax follows")


def gather(address: tuple[str, int], secret: bytes, count: int) -> list[Connection]:
    """Listen until so many have come and proved that they know the secret.

    Args:
        address: where to listen, name and port.
        secret: the same for all.
        count: of connections.

    Raises:
        OSError: if it cannot listen there.
    """
    found: list[Connection] = []
    with socket.create_server(address, backlog=max(count, 16)) as listening:
        while len(found) < count:
            one, _ = listening.accept()
            with one:
                try:
                    found.append(_proved(one, secret, _TAKES_S, leads=True))
                except (AuthenticationError, OSError) as error:
                    _log.warning("somebody without the secret was sent away: %s", error)
    return found


def reach(address: tuple[str, int], secret: bytes) -> Connection:
    """Connect to the one that gathers.

    Raises:
        OSError: if nobody listens there, or does not answer in time.
        AuthenticationError: if it has another secret.
    """
    # The leader sees to one after another, and a stranger may be before this one.
    with socket.create_connection(address, _TAKES_S) as one:
        return _proved(one, secret, 4 * _TAKES_S, leads=False)


def _proved(one: socket.socket, secret: bytes, takes_s: float, *, leads: bool) -> Connection:
    until_s = time.monotonic() + takes_s
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many small messages, unanswered
    one.settimeout(takes_s)
    mine = secrets.token_bytes(_DRAWN_BYTES)
    one.sendall(mine)
    theirs = _read(one, _DRAWN_BYTES, until_s)
    both = mine + theirs if leads else theirs + mine
    own, other = _ROLES if leads else _ROLES[::-1]
    one.sendall(hmac.digest(secret, own + both, _HASH))
    if not hmac.compare_digest(_read(one, _HASH_BYTES, until_s), hmac.digest(secret, other + both, _HASH)):
        raise AuthenticationError("its proof is of another secret")
    one.settimeout(None)
    return Connection(one.detach())


def _read(one: socket.socket, count: int, until_s: float) -> bytes:
    data = b""
    while len(data) < count:
        one.settimeout(max(until_s - time.monotonic(), 1e-3))
        part = one.recv(count - len(data))
        if not part:
            raise ConnectionError("the other one closed the connection before it had proved anything")
        data += part
    return data
