"""What goes over the wire, and when: joined writes, pipelining, and who watches the client."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from servax.server.http import wire
from servax.server.http.protocol import JoinedWrites
from servax.server.http.testing import running
from servax.server.http.wire import ClientGoneError, Reply, run_while_connected

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Written(asyncio.Transport):
    """A transport that notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def write(self, data: Any) -> None:
        self.seen.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.seen.append(b"".join(list_of_data))

    def close(self) -> None:
        self.seen.append(b"<close>")

    def is_closing(self) -> bool:
        return b"<close>" in self.seen


def written(act: Callable[[JoinedWrites, Written], Awaitable[None]]) -> list[bytes]:
    async def go() -> list[bytes]:
        below = Written()
        await act(JoinedWrites(below, asyncio.get_running_loop()), below)
        return below.seen

    return asyncio.run(go())


def test_head_and_body_go_out_together() -> None:
    async def act(joined: JoinedWrites, below: Written) -> None:
        for _ in range(2):
            joined.write(HEAD)
            joined.write(b"ok")
        await asyncio.sleep(0)

    assert written(act) == [HEAD + b"ok"] * 2


def test_a_head_alone_is_not_kept_back_longer_than_a_turn() -> None:
    async def act(joined: JoinedWrites, below: Written) -> None:
        joined.write(HEAD)
        assert below.seen == []
        await asyncio.sleep(0)
        assert below.seen == [HEAD]
        joined.write(b"o")
        joined.write(b"k")

    assert written(act) == [HEAD, b"o", b"k"]


def test_closing_writes_what_was_kept() -> None:
    async def act(joined: JoinedWrites, below: Written) -> None:
        joined.write(HEAD)
        joined.close()
        assert joined.is_closing()
        await asyncio.sleep(0)

    assert written(act) == [HEAD, b"<close>"]


async def slowly(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    if scope["path"] == "/slow":
        await receive()  # until the client has left: the head alone must have reached it
        return
    await send({"type": "http.response.body", "body": b"ok"})


def test_over_a_socket_pipelined_and_with_a_late_body() -> None:
    with running(slowly) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
            found = b""
            while found.count(b"\r\n\r\nok") < 3:
                found += client.recv(65536)
            assert found.count(b"HTTP/1.1 200 OK") == 3
            client.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


# -- watching the client ----------------------------------------------------------------------------------


class Client:
    """Leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_that_ends_soon_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        client = Client()

        async def work() -> Reply:
            await asyncio.sleep(0)
            return Reply(b"done")

        assert (await run_while_connected(work(), client.receive)).body == b"done"
        monkeypatch.setattr(wire, "WATCH_AFTER_S", 0.0)

        async def watched() -> Reply:
            while not client.asked:
                await asyncio.sleep(0)
            return Reply(b"done")

        assert (await run_while_connected(watched(), client.receive)).body == b"done"

    asyncio.run(go())


def test_X1_work_of_a_client_that_left_is_cancelled() -> None:
    async def go() -> None:
        client, cancelled = Client(), asyncio.Event()
        client.left.set()

        async def work() -> Reply:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return Reply(b"")

        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(run_while_connected(work(), client.receive), 30)
        assert cancelled.is_set()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left over

    asyncio.run(go())


def test_a_cancel_from_outside_stays_one() -> None:
    async def go() -> None:
        client, begun = Client(), asyncio.Event()

        async def work() -> Reply:
            begun.set()
            await asyncio.get_running_loop().create_future()
            return Reply(b"")

        task = asyncio.create_task(run_while_connected(work(), client.receive))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


def test_a_client_that_breaks_is_one_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WATCH_AFTER_S", 0.0)

    async def broken() -> dict[str, Any]:
        raise OSError("reset")

    async def work() -> Reply:
        await asyncio.get_running_loop().create_future()
        return Reply(b"")

    async def go() -> None:
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(run_while_connected(work(), broken), 30)

    asyncio.run(go())
