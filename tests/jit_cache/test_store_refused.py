"""Entries that are damaged, forged, or kill who loads them; the executable is only a number."""

import os
import pickle

import pytest
from servax.jit_cache.store import Store, TrialResult, load_or_compile


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
    assert host.counts(store) == (11, 0, 1)
    assert list(host.compiles) == [3]
    assert store.report().reasons[host.key(3).digest].startswith(kind)
    assert len(store.report().warnings) == 1
    assert host.quarantine() == [kind]
    assert host.counts(host.start()) == (12, 0, 0)


def test_S1_a_foreign_pickle_is_never_loaded(host, tmp_path):
    host.start()
    witness = tmp_path / "witness"
    host.entry(3).write_bytes(pickle.dumps(Bomb(witness)))
    assert host.counts(host.start()) == (11, 0, 1)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Bomb(witness))).close()
    assert witness.exists()


def test_S1_an_entry_signed_elsewhere_is_never_loaded(host, tmp_path):
    forged = Store.open(tmp_path / "other", home=tmp_path / "other-home", trial=None)
    witness = tmp_path / "witness"
    forged.put(host.key(3), pickle.dumps(Bomb(witness)))
    host.start()
    host.entry(3).write_bytes(host.entry(3, "other").read_bytes())
    assert host.counts(host.start()) == (11, 0, 1)
    assert host.quarantine() == ["unsigned"]
    assert not witness.exists()


def test_S1_an_entry_under_another_name_is_never_loaded(host):
    host.start()
    os.replace(host.entry(4), host.entry(3))
    assert host.counts(host.start()) == (10, 1, 1)
    assert host.quarantine() == ["renamed"]


def test_S2_a_program_that_kills_its_process_is_tried_in_a_child_and_marked_bad(host):
    tried = []

    def trial(payload):
        tried.append(payload)
        deadly = pickle.loads(payload) == 30
        return TrialResult(not deadly, "loading it killed a child process with SIGSEGV" if deadly else "")

    host.start()  # trusts everything: no trial so far
    store = host.start([3, 1, 2], trial=trial)
    # 3 dies; the fresh copy of it dies as well, so this host never tries it again
    assert host.counts(store) == (2, 0, 1)
    assert "SIGSEGV" in store.report().reasons[host.key(3).digest]
    assert host.quarantine() == ["deadly"]
    assert len(tried) == 4  # after a death every entry is tried by itself
    host.new_compiles()
    tried.clear()
    again = host.start([1, 2, 3], trial=trial)
    assert host.counts(again) == (2, 1, 0)
    assert "this host cannot load it" in again.report().reasons[host.key(3).digest]
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
    for one in (host.key(1), host.key(2), host.key(1, cpu="other"), host.key(2, cpu="other")):
        load_or_compile(store, one, lambda: 1, codec=host.codec())
    assert len(tried) == 2


def test_S5_a_host_that_refuses_all_warns_and_is_repaired_once(host):
    host.start()
    refusing = host.codec(refuses=lambda payload: True)
    store = host.start(codec=refusing)
    assert host.counts(store) == (0, 0, 12)
    assert any("loaded 0 of 12" in one and "wrong machine" in one for one in store.report().warnings)
    assert refusing.loads == 24  # each old one, and each fresh one
    again = host.start(codec=refusing)
    assert host.counts(again) == (0, 12, 0)
    assert refusing.loads == 24  # not paid again


def test_S5_a_store_written_by_a_worse_host_is_repaired_once(host):
    codec = host.codec(refuses=lambda payload: payload == b"old")
    store = host.open()
    for number in range(1, 13):
        store.put(host.key(number), b"old")
    assert host.counts(host.start(codec=codec)) == (0, 0, 12)
    assert host.counts(host.start(codec=codec)) == (12, 0, 0)
