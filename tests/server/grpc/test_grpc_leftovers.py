"""What killed servers left in the temporary folder is removed, and nothing else."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servax.server.rpc import leftovers
from servax.server.rpc.testing import running_grpc

Make = Callable[..., Path]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short name: the path of a socket holds about 100 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def dead() -> int:
    """The id of a process that is gone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.fixture
def leave(temporary: Path) -> Iterator[Make]:
    """Makes a folder as a server with this id does; without `alive`, as it is after a SIGKILL."""
    open_ones = []

    def make(name: object, *, alive: bool = False) -> Path:
        folder = temporary / f"servax-lag-{name}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "lag"))
        listener.listen()
        if alive:
            open_ones.append(listener)
        else:
            listener.close()
        return folder

    yield make
    for one in open_ones:
        one.close()


def test_sockets_of_the_dead_go_and_no_others(leave: Make, temporary: Path, dead: int) -> None:
    gone = [leave(f"{dead}-one"), leave(f"{dead}-two"), leave(f"{os.getpid()}-restarted")]
    kept = [
        leave(f"{os.getppid()}-alive"),
        leave(f"{dead}-elsewhere", alive=True),  # of another container, where this id is somebody
        leave(f"{os.getpid()}-ours", alive=True),
        leave("x-no_number"),
        temporary / "servax-store",
    ]
    kept[-1].mkdir()
    more = leave(f"{dead}-more")
    (more / "file").touch()
    linked = temporary / f"servax-lag-{dead}-linked"
    linked.symlink_to(kept[0])
    assert leftovers.clear(str(temporary)) == len(gone)
    assert sorted(temporary.iterdir()) == sorted([*kept, more, linked])


def test_those_of_other_users_stay(
    leave: Make, temporary: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(f"{dead}-theirs")
    monkeypatch.setattr(leftovers.os, "getuid", lambda: os.stat(folder).st_uid + 1)
    assert leftovers.clear(str(temporary)) == 0
    assert folder.exists()


def test_few_are_removed_at_once_and_a_missing_folder_is_no_error(
    leave: Make, temporary: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_MOST_REMOVED", 2)
    for number in range(3):
        leave(f"{dead}-{number}")
    assert [leftovers.clear(str(temporary)) for _ in range(3)] == [2, 1, 0]
    assert leftovers.clear(str(temporary / "none")) == 0


def test_a_server_clears_them_as_it_starts_and_leaves_nothing(
    site: Any, leave: Make, temporary: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    left = leave(f"{dead}-killed")
    with running_grpc(site.make):
        (own,) = temporary.iterdir()
        assert own != left
        assert own.name.startswith(f"servax-lag-{os.getpid()}-")
        assert leftovers.clear(str(temporary)) == 0
    assert list(temporary.iterdir()) == []
