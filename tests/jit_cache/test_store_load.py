"""The whole way of a program through the store, with an executable that is only a number."""

import errno
import os
import pickle
from collections import Counter

import pytest
from servax.jit_cache.errors import LoadRefused, NotStorable, StoreError, StoreUnsafe
from servax.jit_cache.store import Fingerprint, Store, TrialResult, load_or_compile


def key(number, **environment):
    return Fingerprint(
        {
            "model": {"code": "abc"},
            "program": {"bucket": {"batch": number}},
            "environment": {"jaxlib": "1", **environment},
        }
    )


class Numbers:
    """Executables are integers; a pickle, like the real ones."""

    def __init__(self, refuses=False, storable=True):
        self.refuses, self.storable = refuses, storable
        self.loads = 0

    def dump(self, executable, devices):
        if not self.storable:
            raise NotStorable("it calls back")
        return pickle.dumps(executable), {"targets": []}

    def load(self, payload, devices):
        self.loads += 1
        if self.refuses:
            raise LoadRefused("wrong machine")
        return pickle.loads(payload)


class Host:
    """Opens one store again and again, as restarts of one process do, and counts compiles."""

    def __init__(self, folder):
        self.folder = folder
        self.compiles = Counter()

    def open(self, location="store", **options):
        options = {"home": self.folder / "home", "trial": None, **options}
        return Store.open(location if "://" in str(location) else self.folder / location, **options)

    def start(self, numbers=range(1, 13), codec=None, **options):
        """One start with a program for each number; returns its store."""
        store = self.open(**options)
        store.pin(map(key, numbers))
        for number in numbers:
            self.fetch(store, number, codec)
        return store

    def fetch(self, store, number, codec=None):
        def build():
            self.compiles[number] += 1
            return number * 10

        made = load_or_compile(store, key(number), build, codec=codec or Numbers())
        assert made.executable == number * 10
        return made

    def new_compiles(self):
        count = self.compiles.total()
        self.compiles.clear()
        return count

    def entry(self, number, location="store"):
        return self.folder / location / "v1" / f"{key(number).digest}.program"

    def quarantine(self):
        return sorted(path.name.split(".")[1] for path in (self.folder / "store" / "quarantine").iterdir())


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def counts(store):
    report = store.report()
    assert report.total == report.loaded + report.compiled + report.refused
    return report.loaded, report.compiled, report.refused


def test_S5_a_second_start_loads_everything(host):
    assert counts(host.start()) == (0, 12, 0)
    host.new_compiles()
    second = host.start()
    assert counts(second) == (12, 0, 0)
    assert str(second.report()) == "loaded 12 of 12 programs from the store"
    assert second.report().warnings == ()
    assert host.new_compiles() == 0


def test_S7_everything_is_stored_however_small_or_quick(host):
    host.start(range(100))
    host.new_compiles()
    host.start(range(100))
    assert host.new_compiles() == 0


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[: len(data) // 2], "torn"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "corrupt"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "unsigned"),
        (lambda data: data[:11] + b"\x09" + data[12:], "future"),
    ],
)
def test_S1_a_bad_entry_is_set_aside_and_rebuilt(host, damage, kind):
    host.start()
    host.new_compiles()
    path = host.entry(3)
    path.write_bytes(damage(path.read_bytes()))
    store = host.start()
    assert counts(store) == (11, 0, 1)
    assert list(host.compiles) == [3]
    assert store.report().reasons[key(3).digest].startswith(kind)
    assert len(store.report().warnings) == 1
    assert host.quarantine() == [kind]
    assert counts(host.start()) == (12, 0, 0)


def test_S1_a_foreign_pickle_is_never_loaded(host, tmp_path):
    host.start()
    witness = tmp_path / "witness"
    host.entry(3).write_bytes(pickle.dumps(Bomb(witness)))
    assert counts(host.start()) == (11, 0, 1)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Bomb(witness))).close()
    assert witness.exists()


def test_S1_an_entry_signed_elsewhere_is_never_loaded(host, tmp_path):
    forged = Store.open(tmp_path / "other", home=tmp_path / "other-home", trial=None)
    witness = tmp_path / "witness"
    forged.put(key(3), pickle.dumps(Bomb(witness)))
    host.start()
    host.entry(3).write_bytes(host.entry(3, "other").read_bytes())
    assert counts(host.start()) == (11, 0, 1)
    assert host.quarantine() == ["unsigned"]
    assert not witness.exists()


def test_S1_an_entry_under_another_name_is_never_loaded(host):
    host.start()
    os.replace(host.entry(4), host.entry(3))
    assert counts(host.start()) == (10, 1, 1)
    assert host.quarantine() == ["renamed"]


def test_C1_with_equal_digests_the_full_key_is_compared(host, monkeypatch):
    monkeypatch.setattr(Fingerprint, "digest", "0" * 64)
    store = host.open()
    for number in (1, 2, 1, 2):
        assert host.fetch(store, number).executable == number * 10
    assert host.quarantine() == []


def test_S2_entries_of_another_fingerprint_are_not_even_read(host):
    store = host.open()
    store.put(key(1, cpu="other"), b"not a pickle")
    codec = Numbers()
    host.fetch(store, 1, codec)
    assert codec.loads == 0
    assert counts(store) == (0, 1, 0)


def test_S2_a_program_that_kills_its_process_is_tried_in_a_child_and_marked_bad(host):
    tried = []

    def trial(payload):
        tried.append(payload)
        deadly = pickle.loads(payload) == 30
        return TrialResult(not deadly, "loading it killed a child process with SIGSEGV" if deadly else "")

    host.start()  # trusts everything: no trial so far
    store = host.start([3, 1, 2], trial=trial)
    # 3 dies; the fresh copy of it dies as well, so this host never tries it again
    assert counts(store) == (2, 0, 1)
    assert "SIGSEGV" in store.report().reasons[key(3).digest]
    assert host.quarantine() == ["deadly"]
    assert len(tried) == 4  # after a death every entry is tried by itself
    host.new_compiles()
    tried.clear()
    again = host.start([1, 2, 3], trial=trial)
    assert counts(again) == (2, 1, 0)
    assert "this host cannot load it" in again.report().reasons[key(3).digest]
    assert len(tried) == 1  # one trial for the environment, not one for each entry
    tried.clear()
    host.start([1, 2, 3], trial=trial)
    assert tried == []


def test_S2_the_first_cold_start_earns_the_mark(host):
    tried = []

    def trial(payload):
        tried.append(payload)
        return TrialResult(True)

    host.start(trial=trial)
    assert len(tried) == 1
    host.start(trial=trial)
    assert len(tried) == 1


def test_S2_another_environment_has_a_trial_of_its_own(host):
    tried = []

    def trial(payload):
        tried.append(payload)
        return TrialResult(True)

    store = host.open(trial=trial)
    for one in (key(1), key(2), key(1, cpu="other"), key(2, cpu="other")):
        load_or_compile(store, one, lambda: 1, codec=Numbers())
    assert len(tried) == 2


def test_S3_a_program_that_cannot_be_stored_is_marked_and_compiled(host):
    codec = Numbers(storable=False)
    assert counts(host.start([1], codec)) == (0, 1, 0)
    second = host.start([1], codec)
    assert counts(second) == (0, 1, 0)
    assert second.report().reasons[key(1).digest] == "cannot be stored: it calls back"
    assert codec.loads == 0
    assert host.new_compiles() == 2


def test_S5_a_host_that_refuses_all_warns_and_is_repaired_once(host):
    host.start()
    refusing = Numbers(refuses=True)
    store = host.start(codec=refusing)
    assert counts(store) == (0, 0, 12)
    assert any("loaded 0 of 12" in one and "wrong machine" in one for one in store.report().warnings)
    assert refusing.loads == 24  # each old one, and each fresh one
    again = host.start(codec=refusing)
    assert counts(again) == (0, 12, 0)
    assert refusing.loads == 24  # not paid again


def test_S5_a_store_written_by_a_worse_host_is_repaired_once(host):
    class Picky(Numbers):
        def load(self, payload, devices):
            if payload == b"old":
                raise LoadRefused("old")
            return super().load(payload, devices)

    store = host.open()
    for number in range(1, 13):
        store.put(key(number), b"old")
    assert counts(host.start(codec=Picky())) == (0, 0, 12)
    assert counts(host.start(codec=Picky())) == (12, 0, 0)


def test_S7_a_cap_below_the_plan_warns_and_does_not_churn(host):
    host.start()
    size = host.entry(5).stat().st_size
    for path in (host.folder / "store" / "v1").iterdir():
        path.unlink()
    cap = size * 10 + size // 2
    first = host.start(max_bytes=cap)
    assert counts(first) == (0, 12, 0)
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
    assert counts(store) == (5, 1, 0)
    assert not host.entry(6).exists()
    assert host.entry(11).exists()


def test_S8_a_missing_folder_is_made(host):
    store = host.start(location="a/b/c")
    assert store.writable
    assert counts(host.start(location="a/b/c")) == (12, 0, 0)


def test_S8_a_folder_that_cannot_be_made_costs_one_warning(host):
    (host.folder / "file").touch()
    store = host.start(location="file/store")
    assert counts(store) == (0, 12, 0)
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
    assert counts(store) == (0, 12, 0)
    assert len(store.report().warnings) == 1
    assert "No space left" in store.report().warnings[0]
    assert list((host.folder / "store" / "v1").iterdir()) == []
    assert host.start().writable  # and it recovers


def test_S8_a_read_only_store_serves_and_stays_as_it_is(host, monkeypatch):
    host.start(range(1, 7))
    before = {path: path.stat().st_mtime_ns for path in (host.folder / "store").rglob("*")}
    store = host.start(readonly=True)
    assert counts(store) == (6, 6, 0)
    assert {path: path.stat().st_mtime_ns for path in (host.folder / "store").rglob("*")} == before

    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    mounted = host.open()
    for name in ("utime", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, read_only)
    for number in range(1, 13):
        host.fetch(mounted, number)
    assert counts(mounted) == (6, 6, 0)
    assert not mounted.writable
    assert len(mounted.report().warnings) == 1


def test_S8_without_a_home_for_the_key_programs_are_compiled(host):
    (host.folder / "file").touch()
    store = host.start(home=host.folder / "file" / "home")
    assert counts(store) == (0, 12, 0)
    assert len(store.report().warnings) == 1
    assert not store.writable


def test_a_store_that_others_can_write_is_refused(host):
    host.start()
    (host.folder / "store").chmod(0o777)
    with pytest.raises(StoreUnsafe, match="writable by its owner only"):
        host.open()


def test_C7_a_failing_compile_reaches_the_caller_and_is_not_kept(host):
    store = host.open()

    def fails():
        raise ValueError("bad model")

    with pytest.raises(ValueError, match="bad model"):
        load_or_compile(store, key(1), fails, codec=Numbers())
    host.fetch(store, 1)
    assert counts(host.start([1])) == (1, 0, 0)


def test_without_a_store_it_compiles():
    made = load_or_compile(None, key(1), lambda: 5)
    assert (made.executable, made.source, made.reason) == (5, "compiled", "there is no store")


def test_facts_come_back(host):
    store = host.open()
    options = {"codec": Numbers(), "facts_of": lambda one: {"flops": one * 2.0}}
    made = load_or_compile(store, key(1), lambda: 7, **options)
    assert made.facts["flops"] == 14.0
    found = load_or_compile(store, key(1), lambda: 7, **options)
    assert found.source == "store"
    assert found.facts == made.facts


def test_S6_a_miss_is_explained_by_the_nearest_entry(host):
    store = host.open()
    assert store.explain_miss(key(1)) == "the store is empty"
    store.put(key(1, xla_flags={"--a": "1"}), b"")
    store.put(key(9, jaxlib="0"), b"")
    assert store.explain_miss(key(9)).splitlines() == ["environment.jaxlib", '  - "0"', '  + "1"']
    wanted = key(9, jaxlib="0")
    assert store.find(wanted.digest[:10]) == wanted
    with pytest.raises(StoreError, match="'' is that of 2 in"):
        store.find("")


def test_listing_verifying_and_cleaning(host):
    host.start(range(1, 5))
    store = host.open()
    assert {one.status for one in store.ls()} == {"unchecked"}
    assert {one.digest for one in store.ls()} == {key(number).digest for number in range(1, 5)}
    assert store.ls()[0].fingerprint.fields["program"]["bucket"] == {"batch": 4}
    assert "compile_s" in store.ls()[0].facts
    host.entry(2).write_bytes(b"")
    (host.folder / "store" / "v1" / ".tmp-dead").touch()
    checked = {one.digest: one.status for one in store.verify()}
    assert checked[key(1).digest] == "ok"
    assert checked[key(2).digest].startswith("empty")
    assert len(store.ls()) == 3
    assert store.gc() == 2  # the orphan, and what verify set aside
    # Room for any one of the three: their sizes differ by the digits of their times.
    assert store.gc(max_bytes=max(one.nbytes for one in store.ls())) == 2
    assert len(store.ls()) == 1
