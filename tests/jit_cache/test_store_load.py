"""The whole way of a program through the store, with an executable that is only a number."""

import pytest
from servax.jit_cache.errors import StoreError
from servax.jit_cache.store import Fingerprint, load_or_compile


def test_S5_a_second_start_loads_everything(host):
    assert host.counts(host.start()) == (0, 12, 0)
    host.new_compiles()
    second = host.start()
    assert host.counts(second) == (12, 0, 0)
    assert str(second.report()) == "loaded 12 of 12 programs from the store"
    assert second.report().warnings == ()
    assert host.new_compiles() == 0


def test_S7_everything_is_stored_however_small_or_quick(host):
    host.start(range(100))
    host.new_compiles()
    host.start(range(100))
    assert host.new_compiles() == 0


def test_C1_with_equal_digests_the_full_key_is_compared(host, monkeypatch):
    monkeypatch.setattr(Fingerprint, "digest", "0" * 64)
    store = host.open()
    for number in (1, 2, 1, 2):
        assert host.fetch(store, number).executable == number * 10
    assert host.quarantine() == []


def test_S2_entries_of_another_fingerprint_are_not_even_read(host):
    store = host.open()
    store.put(host.key(1, cpu="other"), b"not a pickle")
    codec = host.codec()
    host.fetch(store, 1, codec)
    assert codec.loads == 0
    assert host.counts(store) == (0, 1, 0)


def test_S3_a_program_that_cannot_be_stored_is_marked_and_compiled(host):
    codec = host.codec(storable=False)
    assert host.counts(host.start([1], codec)) == (0, 1, 0)
    second = host.start([1], codec)
    assert host.counts(second) == (0, 1, 0)
    assert second.report().reasons[host.key(1).digest] == "cannot be stored: it calls back"
    assert codec.loads == 0
    assert host.new_compiles() == 2


def test_C7_a_failing_compile_reaches_the_caller_and_is_not_kept(host):
    store = host.open()

    def fails():
        raise ValueError("bad model")

    with pytest.raises(ValueError, match="bad model"):
        load_or_compile(store, host.key(1), fails, codec=host.codec())
    host.fetch(store, 1)
    assert host.counts(host.start([1])) == (1, 0, 0)


def test_without_a_store_it_compiles(host):
    made = load_or_compile(None, host.key(1), lambda: 5)
    assert (made.executable, made.source, made.reason) == (5, "compiled", "there is no store")


def test_facts_come_back(host):
    store = host.open()
    options = {"codec": host.codec(), "facts_of": lambda one: {"flops": one * 2.0}}
    made = load_or_compile(store, host.key(1), lambda: 7, **options)
    assert made.facts["flops"] == 14.0
    found = load_or_compile(store, host.key(1), lambda: 7, **options)
    assert found.source == "store"
    assert found.facts == made.facts


def test_S6_a_miss_is_explained_by_the_nearest_entry(host):
    store = host.open()
    assert store.explain_miss(host.key(1)) == "the store is empty"
    store.put(host.key(1, xla_flags={"--a": "1"}), b"")
    store.put(host.key(9, jaxlib="0"), b"")
    assert store.explain_miss(host.key(9)).splitlines() == ["environment.jaxlib", '  - "0"', '  + "1"']
    wanted = host.key(9, jaxlib="0")
    assert store.find(wanted.digest[:10]) == wanted
    with pytest.raises(StoreError, match="'' is that of 2 in"):
        store.find("")


def test_listing_verifying_and_cleaning(host):
    host.start(range(1, 5))
    store = host.open()
    assert {one.status for one in store.ls()} == {"unchecked"}
    assert {one.digest for one in store.ls()} == {host.key(number).digest for number in range(1, 5)}
    assert store.ls()[0].fingerprint.fields["program"]["bucket"] == {"batch": 4}
    assert "compile_s" in store.ls()[0].facts
    host.entry(2).write_bytes(b"")
    (host.folder / "store" / "v1" / ".tmp-dead").touch()
    checked = {one.digest: one.status for one in store.verify()}
    assert checked[host.key(1).digest] == "ok"
    assert checked[host.key(2).digest].startswith("empty")
    assert len(store.ls()) == 3
    assert store.gc() == 2  # the orphan, and what verify set aside
    # Room for any one of the three: their sizes differ by the digits of their times.
    assert store.gc(max_bytes=max(one.nbytes for one in store.ls())) == 2
    assert len(store.ls()) == 1
