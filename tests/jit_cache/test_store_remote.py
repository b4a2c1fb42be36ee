"""A copy of the store elsewhere: read after the local directory, never waited for long."""

import contextlib
import threading
import time

import pytest
from servax.jit_cache.store import Fingerprint, Store, load_or_compile

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")


def key(number=1):
    return Fingerprint({"program": {"bucket": {"batch": number}}})


@pytest.fixture
def url():
    files = memory.MemoryFileSystem()
    yield "memory://programs"
    with contextlib.suppress(FileNotFoundError):
        files.rm("/programs", recursive=True)


def opened(tmp_path, url, name, **options):
    return Store.open(
        url, local=tmp_path / name, home=tmp_path / "home", trial=None, **{"remote_budget_s": 5.0, **options}
    )


def test_a_program_travels_through_the_remote_copy(tmp_path, url):
    here = opened(tmp_path, url, "here")
    assert here.put(key(), b"payload", {"compile_s": 1.0})
    assert here.flush()
    there = opened(tmp_path, url, "there")
    found = there.get(key())
    assert (found.payload, found.facts) == (b"payload", {"compile_s": 1.0})
    assert (tmp_path / "there" / "v1" / f"{key().digest}.program").exists()  # local from now on
    assert there.get(key(2)) is None
    assert there.report().warnings == ()


def test_a_local_entry_needs_no_remote(tmp_path, url, monkeypatch):
    store = opened(tmp_path, url, "here")
    store.put(key(), b"payload")
    store.flush()
    asked = []
    monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", lambda *_: asked.append(1))
    assert store.get(key()).payload == b"payload"
    assert asked == []


def test_S1_a_bad_remote_entry_is_refused_and_replaced(tmp_path, url):
    here = opened(tmp_path, url, "here")
    here.put(key(), b"payload")
    here.flush()
    files = memory.MemoryFileSystem()
    name = f"/programs/{key().digest}.program"
    files.pipe_file(name, b"\x89servax\n torn")
    there = opened(tmp_path, url, "there")
    assert there.get(key()) is None
    assert there.report().refused == 1
    there.put(key(), b"payload")
    there.flush()
    assert opened(tmp_path, url, "third").get(key()).payload == b"payload"


def test_S8_a_remote_that_never_answers_is_given_up(tmp_path, url, monkeypatch):
    silent = threading.Event()
    monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", lambda *_: silent.wait())
    store = opened(tmp_path, url, "here", remote_budget_s=0.1)
    begin = time.monotonic()
    for number in range(12):
        assert load_or_compile(store, key(number), lambda: b"x", codec=Plain()).source == "compiled"
    assert not store.flush()
    assert time.monotonic() - begin < 20  # of waiting without end
    assert len(store.report().warnings) == 1
    assert "did not answer within 0.1 s" in store.report().warnings[0]
    assert opened(tmp_path, None, "here").get(key(11)) is not None  # stored locally all the same
    silent.set()


def test_S8_a_remote_that_does_not_exist_costs_one_warning(tmp_path):
    store = opened(tmp_path, "nonsense://somewhere", "here")
    assert load_or_compile(store, key(), lambda: b"x", codec=Plain()).source == "compiled"
    assert load_or_compile(store, key(2), lambda: b"x", codec=Plain()).source == "compiled"
    assert len(store.report().warnings) == 1


def test_a_file_url_is_a_directory(tmp_path):
    store = Store.open(f"file://{tmp_path}/store", home=tmp_path / "home", trial=None)
    store.put(key(), b"payload")
    assert Store.open(tmp_path / "store", home=tmp_path / "home").get(key()).payload == b"payload"


class Plain:
    def dump(self, executable, devices):
        return executable, {}

    def load(self, payload, devices):
        return payload
