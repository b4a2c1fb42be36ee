"""A store whose disk is full, read-only, foreign or capped, with an executable that is only a number."""

import errno
import os

import pytest
from servax.jit_cache.errors import StoreUnsafe


def test_S7_a_cap_below_the_plan_warns_and_does_not_churn(host):
    host.start()
    size = host.entry(5).stat().st_size
    for path in (host.folder / "store" / "v1").iterdir():
        path.unlink()
    cap = size * 10 + size // 2
    first = host.start(max_bytes=cap)
    assert host.counts(first) == (0, 12, 0)
    assert [one for one in first.report().warnings if "cap" in one and str(cap) in one]
    host.new_compiles()
    for numbers in (range(1, 13), range(12, 0, -1), [7, 1, 12, 3, 2, 11, 4, 10, 5, 9, 6, 8]):
        store = host.start(numbers, max_bytes=cap)
        assert host.new_compiles() == 2
        assert len(store.report().warnings) == 1


def test_S7_what_nobody_planned_leaves_first(host):
    host.start(range(1, 11))
    cap = sum(path.stat().st_size for path in (host.folder / "store" / "v1").iterdir())
    store = host.start([*range(1, 6), 11], max_bytes=cap)
    assert host.counts(store) == (5, 1, 0)
    assert not host.entry(6).exists()
    assert host.entry(11).exists()


def test_S8_a_missing_folder_is_made(host):
    store = host.start(location="a/b/c")
    assert store.writable
    assert host.counts(host.start(location="a/b/c")) == (12, 0, 0)


def test_S8_a_folder_that_cannot_be_made_costs_one_warning(host):
    (host.folder / "file").touch()
    store = host.start(location="file/store")
    assert host.counts(store) == (0, 12, 0)
    assert len(store.report().warnings) == 1
    assert "cannot be written" in store.report().warnings[0]


def test_S8_a_full_disk_costs_one_warning(host, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = host.open()
    monkeypatch.setattr(os, "write", full)
    for number in range(1, 13):
        host.fetch(store, number)
    monkeypatch.undo()
    assert host.counts(store) == (0, 12, 0)
    assert len(store.report().warnings) == 1
    assert "No space left" in store.report().warnings[0]
    assert list((host.folder / "store" / "v1").iterdir()) == []
    assert host.start().writable  # and it recovers


def test_S8_a_read_only_store_serves_and_stays_as_it_is(host, monkeypatch):
    host.start(range(1, 7))
    before = {path: path.stat().st_mtime_ns for path in (host.folder / "store").rglob("*")}
    store = host.start(readonly=True)
    assert host.counts(store) == (6, 6, 0)
    assert {path: path.stat().st_mtime_ns for path in (host.folder / "store").rglob("*")} == before

    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    mounted = host.open()
    for name in ("utime", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, read_only)
    for number in range(1, 13):
        host.fetch(mounted, number)
    assert host.counts(mounted) == (6, 6, 0)
    assert not mounted.writable
    assert len(mounted.report().warnings) == 1


def test_S8_without_a_home_for_the_key_programs_are_compiled(host):
    (host.folder / "file").touch()
    store = host.start(home=host.folder / "file" / "home")
    assert host.counts(store) == (0, 12, 0)
    assert len(store.report().warnings) == 1
    assert not store.writable


def test_a_store_that_others_can_write_is_refused(host):
    host.start()
    (host.folder / "store").chmod(0o777)
    with pytest.raises(StoreUnsafe, match="writable by its owner only"):
        host.open()
