"""The store's directory, eviction and leases."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.jit_cache.errors import StoreUnsafe
from servax.jit_cache.store.disk import Disk, Stored
from servax.jit_cache.store.evict import choose
from servax.jit_cache.store.lease import lease, try_lock


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "deep" / "store")
    made.prepare()
    return made


def test_write_read_replace(disk):
    assert disk.read("a") is None
    disk.write("a", b"one")
    first = disk.read("a")
    disk.write("a", b"two")
    second = disk.read("a")
    assert (first.data, second.data) == (b"one", b"two")
    assert first.file != second.file
    assert [path.name for path in disk.entries.iterdir()] == ["a.program"]


def test_a_failed_write_leaves_nothing(disk, monkeypatch):
    disk.write("a", b"one")

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        disk.write("a", b"two")
    monkeypatch.undo()
    assert disk.read("a").data == b"one"
    assert len(list(disk.entries.iterdir())) == 1


def test_a_short_write_is_continued(disk, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    disk.write("a", b"0123456789")
    assert disk.read("a").data == b"0123456789"


def test_a_directory_that_vanishes_is_made_again(disk):
    for folder in (disk.entries, disk.leases, disk.quarantined, disk.root):
        folder.rmdir()
    disk.write("a", b"one")
    assert disk.read("a").data == b"one"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directories_writable_by_others_are_refused(disk, mode):
    disk.check_safe()
    os.chmod(disk.root, mode)
    with pytest.raises(StoreUnsafe, match=r"writable by its owner only.*chmod go-w"):
        disk.check_safe()


def test_set_aside_keeps_the_newest_few(disk):
    for number in range(20):
        disk.write("a", str(number).encode())
        assert disk.set_aside("a", "torn")
    assert not disk.set_aside("a", "torn")
    kept = list(disk.quarantined.iterdir())
    assert len(kept) == 16
    assert b"19" in {path.read_bytes() for path in kept}
    assert disk.empty_quarantine() == 16


def test_set_aside_spares_an_entry_that_was_repaired_meanwhile(disk):
    disk.write("a", b"bad")
    bad = disk.read("a").file
    disk.write("a", b"good")
    assert not disk.set_aside("a", "torn", bad)
    assert disk.read("a").data == b"good"


def test_the_order_of_use_survives_a_clock_that_steps_back(disk, monkeypatch):
    for digest in ("a", "b", "c"):
        disk.write(digest, b"x")
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)  # 1970
    disk.touch("a")
    again = Disk(disk.root)
    again.scan()
    again.touch("b")
    order = [one.digest for one in sorted(again.scan(), key=lambda one: one.used_ns)]
    assert order == ["c", "a", "b"]


def test_sweep_takes_what_dead_writers_left_and_spares_the_living(disk):
    dead, alive = disk.entries / ".tmp-dead", disk.entries / ".tmp-alive"
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    (disk.leases / "old").touch()
    descriptor = try_lock(alive)
    assert disk.sweep() == 2
    assert [path.name for path in disk.entries.iterdir()] == [".tmp-alive"]
    os.close(descriptor)


def test_orphans_are_no_entries(disk):
    (disk.entries / ".tmp-x.program").write_bytes(b"half")
    (disk.entries / "note.txt").write_bytes(b"hello")
    assert disk.scan() == []


stored = st.lists(
    st.builds(Stored, st.text("ab", min_size=1, max_size=4), st.integers(1, 50), st.integers(0, 9)),
    unique_by=lambda one: one.digest,
)


@given(stored, st.integers(0, 200), st.integers(0, 60), st.sets(st.text("ab", min_size=1, max_size=4)))
def test_eviction_makes_room_in_order_of_age_and_spares_pins(entries, cap, incoming, kept):
    leaving = choose(entries, cap, incoming, kept)
    size = {one.digest: one.nbytes for one in entries}
    free = [one.digest for one in sorted(entries, key=lambda one: (one.used_ns, one.digest))]
    free = [digest for digest in free if digest not in kept]
    if leaving is None:
        assert sum(size[one] for one in size if one in kept) + incoming > cap
        return
    assert leaving == free[: len(leaving)]
    left = sum(size.values()) - sum(size[one] for one in leaving)
    assert left + incoming <= cap or (incoming == 0 and len(leaving) == len(free))
    if leaving:
        assert left + size[leaving[-1]] + incoming > cap  # not one more than needed


def test_lease_excludes_and_ends(tmp_path):
    path = tmp_path / "one"
    with lease(path, 0) as first:
        assert first.held
        with lease(path, 0.02) as second:
            assert not second.held
            assert "another process held the lease" in second.reason
    with lease(path, 0) as third:
        assert third.held
    assert not path.exists()


def test_lease_is_handed_on_to_one_who_waits(tmp_path):
    path, entered, inside, most = tmp_path / "one", threading.Barrier(8), [0], [0]

    def work():
        entered.wait()
        with lease(path, 30) as mine:
            assert mine.held
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


_HOLDER = """
import sys
from pathlib import Path
from servax.jit_cache.store.lease import lease
with lease(Path(sys.argv[1]), 0) as mine:
    print(mine.held, flush=True)
    sys.stdin.read()
"""


def test_S4_the_lease_of_a_killed_process_ends_at_once(tmp_path):
    path = tmp_path / "one"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"True\n"
        with lease(path, 0) as mine:
            assert not mine.held
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lease(path, 0) as mine:
            assert mine.held


def test_lease_without_locks_lets_everybody_compile(tmp_path):
    with lease(tmp_path / "missing" / "one", 5) as mine:
        assert not mine.held
        assert "no lease here" in mine.reason
